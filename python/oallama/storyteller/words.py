"""The words of the stories. Changing any of them changes the text, and asks for a new training."""

WOMEN = ("Anna", "Clara", "Emma", "Grace", "Iris", "Kate", "Mia", "Olivia")
MEN = ("Ben", "David", "Felix", "Henry", "Jack", "Leo", "Noah", "Paul")
PEOPLE = WOMEN + MEN
PLACES = (
    "garden", "kitchen", "forest", "market", "school", "park", "library", "barn", "station", "castle", "bakery",
    "harbour",
)  # fmt: skip
THINGS = ("ball", "book", "hat", "lamp", "drum", "kite", "key", "cup", "bag", "bell", "boat", "coat", "ring", "spoon")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
FRUITS = ("apple", "pear", "plum", "fig", "lemon", "nut", "carrot", "cake")
ANIMALS = ("cat", "dog", "bird", "horse", "rabbit", "frog", "sheep", "goat", "hen", "mouse", "cow", "bee")
MOODS = ("happy", "tired", "hungry", "proud", "calm", "excited", "cheerful", "busy")
WEATHERS = ("sunny", "rainy", "windy", "snowy", "cold", "warm", "cloudy", "bright")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

SLOTS = {
    "p": PEOPLE,
    "q": PEOPLE,
    "place": PLACES,
    "thing": THINGS,
    "colour": COLOURS,
    "fruit": FRUITS,
    "animal": ANIMALS,
    "mood": MOODS,
    "weather": WEATHERS,
    "n": NUMBERS[1:],
    "m": NUMBERS[1:],
}
