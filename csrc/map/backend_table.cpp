#include "backend_table.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace {

constexpr const char * header       = "# oallama backend map v1";
constexpr int          max_slots    = 64;
constexpr int          max_uploads  = 64;
constexpr long         most_experts = 1 << 16;

// One line: its fields in order, and the exception that names it.
struct table_line {
    std::string        text;
    int                number;
    std::istringstream fields;

    table_line(const std::string & text, int number) : text(text), number(number), fields(text) {}

    std::invalid_argument bad(const std::string & why) const {
        return std::invalid_argument("backend map, line " + std::to_string(number) + ": " + why + ": '" + text + "'");
    }

    std::string next() {
        std::string field;
        fields >> field;
        return field;
    }

    bool ended() { return next().empty(); }
};

// A whole field as a number; -1: it is none.
long number_of(const std::string & field) {
    char *     end   = nullptr;
    const long value = std::strtol(field.c_str(), &end, 10);
    return field.empty() || *end != '\0' ? -1 : value;
}

void add_layer(oa_backend_table & table, table_line & line) {
    const long        il     = number_of(line.next());
    const std::string device = line.next();
    if (il < 0 || device.empty() || !line.ended()) {
        throw line.bad("expected 'layer <number> <device>'");
    }
    if (!table.layers.emplace(int(il), device).second) {
        throw line.bad("layer listed twice");
    }
}

bool read_mode(const std::string & word, oa_weight_mode & mode) {
    static const std::map<std::string, oa_weight_mode> modes = {
        { "resident", oa_weight_mode::resident },
        { "host", oa_weight_mode::host },
        { "upload", oa_weight_mode::upload },
        { "stream", oa_weight_mode::stream },
    };
    const auto it = modes.find(word);
    if (it != modes.end()) {
        mode = it->second;
    }
    return it != modes.end();
}

bool read_realisation(const std::string & word, oa_realisation & realisation) {
    static const std::map<std::string, oa_realisation> realisations = {
        { "", oa_realisation::any },
        { "plain", oa_realisation::plain },
        { "repacked", oa_realisation::repacked },
        { "tiled", oa_realisation::tiled },
        { "repacked+tiled", oa_realisation::twice },
    };
    const auto it = realisations.find(word);
    if (it != realisations.end()) {
        realisation = it->second;
    }
    return it != realisations.end();
}

void add_weight(oa_backend_table & table, table_line & line) {
    oa_table_weight   weight;
    const std::string name = line.next();
    weight.device          = line.next();
    const bool known       = read_mode(line.next(), weight.mode);
    const bool is_streamed = known && weight.mode == oa_weight_mode::stream;
    if (is_streamed && !(line.fields >> weight.stream_from && weight.stream_from >= 1)) {
        throw line.bad("expected 'stream <tokens>', 1 or more");
    }
    const bool fits = read_realisation(line.next(), weight.realisation);
    if (weight.device.empty() || !known || !fits || !line.ended()) {
        throw line.bad("expected 'tensor <name> <device> resident|host|upload|stream <tokens> "
                       "[plain|repacked|tiled|repacked+tiled]'");
    }
    // An RPC server of ours has our kernels, too.
    if (weight.realisation != oa_realisation::any && weight.realisation != oa_realisation::tiled &&
        weight.mode == oa_weight_mode::resident) {
        throw line.bad("a resident weight is tiled, or has no realisation");
    }
    if (!table.weights.emplace(name, weight).second) {
        throw line.bad("tensor listed twice");
    }
}

// "0,3-5" as 0, 3, 4, 5; empty: it is no list of rising numbers.
std::vector<int32_t> experts_of(const std::string & list) {
    std::vector<int32_t> found;
    std::istringstream   ranges(list);
    for (std::string range; std::getline(ranges, range, ',');) {
        const size_t dash  = range.find('-');
        const long   first = number_of(range.substr(0, dash));
        const long   last  = dash == std::string::npos ? first : number_of(range.substr(dash + 1));
        if (first < 0 || last < first || last >= most_experts || (!found.empty() && first <= found.back())) {
            return {};
        }
        for (long e = first; e <= last; ++e) {
            found.push_back(int32_t(e));
        }
    }
    return found;
}

bool read_part(const std::string & axis, const std::string & part, oa_division & found) {
    if (axis == "experts") {
        found.axis    = oa_segment_axis::experts;
        found.experts = experts_of(part);
        found.count   = int64_t(found.experts.size());
    } else {
        found.axis  = axis == "columns" ? oa_segment_axis::columns : oa_segment_axis::rows;
        found.count = number_of(part);
    }
    return found.count >= 1 && (axis == "rows" || axis == "columns" || axis == "experts");
}

// Behind "slots": how many, and what is in them at the beginning.
oa_division slots_of(table_line & line) {
    oa_division found;
    found.axis              = oa_segment_axis::experts;
    const long        slots = number_of(line.next());
    const std::string word  = line.next();
    if (word == "experts") {
        found.experts = experts_of(line.next());
    }
    if (slots < 1 || slots >= most_experts || (word == "experts") == found.experts.empty() ||
        !(word.empty() || word == "experts") || !line.ended()) {
        throw line.bad("expected 'segment <name> <device> slots <number> [experts <numbers>]', 1 slot or more, numbers "
                       "rising, as 0,3-5");
    }
    if (long(found.experts.size()) > slots) {
        throw line.bad("more experts than slots");
    }
    found.slots = int(slots);
    found.count = slots;
    return found;
}

void add_segment(oa_backend_table & table, table_line & line) {
    oa_table_segment  segment;
    const std::string name = line.next();
    segment.device         = line.next();
    const std::string axis = line.next();
    if (axis == "slots") {
        segment.part = slots_of(line);
    } else if (!read_part(axis, line.next(), segment.part) || !line.ended()) {
        throw line.bad("expected 'segment <name> <device> rows|columns <number>', 1 or more, or "
                       "'segment <name> <device> experts <numbers>', rising, as 0,3-5, or 'segment <name> <device> "
                       "slots <number>'");
    }
    if (!table.segments.emplace(name, segment).second) {
        throw line.bad("segment listed twice");
    }
}

void add_slots(oa_backend_table & table, table_line & line) {
    const long slots    = number_of(line.next());
    table.options.slots = int(slots);
    if (slots < 2 || slots > max_slots || !line.ended()) {
        throw line.bad("expected 'slots <number>', 2 to " + std::to_string(max_slots));
    }
}

void add_uploads(oa_backend_table & table, table_line & line) {
    const long uploads    = number_of(line.next());
    table.options.uploads = int(uploads);
    if (uploads < 1 || uploads > max_uploads || !line.ended()) {
        throw line.bad("expected 'uploads <number>', 1 to " + std::to_string(max_uploads));
    }
}

void add_word(bool & option, const char * kind, const char * word, table_line & line) {
    option = true;
    if (line.next() != word || !line.ended()) {
        throw line.bad(std::string("expected '") + kind + " " + word + "'");
    }
}

void add(oa_backend_table & table, table_line & line) {
    const std::string kind = line.next();
    if (kind == "layer") {
        add_layer(table, line);
    } else if (kind == "tensor") {
        add_weight(table, line);
    } else if (kind == "segment") {
        add_segment(table, line);
    } else if (kind == "slots") {
        add_slots(table, line);
    } else if (kind == "uploads") {
        add_uploads(table, line);
    } else if (kind == "caches") {
        add_word(table.options.stream_caches, "caches", "stream", line);
    } else if (kind == "arenas") {
        add_word(table.options.offline_arenas, "arenas", "offline", line);
    } else if (kind == "attention") {
        add_word(table.options.own_attention, "attention", "oallama", line);
    } else if (kind == "layers") {
        add_word(table.options.whole_layers, "layers", "whole", line);
    } else {
        throw line.bad(
            "expected 'layer', 'tensor', 'segment', 'slots', 'uploads', 'caches', 'arenas', 'attention' or 'layers'");
    }
}

// What no line alone can tell.
void check(const oa_backend_table & table) {
    for (const auto & [name, weight] : table.weights) {
        const bool divided = table.segments.count(name) > 0, twice = weight.realisation == oa_realisation::twice;
        if (weight.mode == oa_weight_mode::upload && !divided &&
            (weight.realisation == oa_realisation::repacked || twice)) {
            throw std::invalid_argument("backend map: '" + name + "' may be uploaded, so it is plain");
        }
        if (divided && twice) {
            throw std::invalid_argument("backend map: '" + name + "' is divided, so it has one realisation");
        }
    }
    for (const auto & [name, segment] : table.segments) {
        if (table.weights.count(name) == 0) {
            throw std::invalid_argument("backend map: a segment of '" + name + "', which has no line 'tensor'");
        }
    }
}

} // namespace

oa_backend_table oa_backend_table_parse(const std::string & text) {
    oa_backend_table   table;
    std::istringstream lines(text);
    std::string        next;
    int                number = 0;
    while (std::getline(lines, next)) {
        table_line line(next, ++number);
        if (number == 1 && next != header) {
            throw line.bad(std::string("expected '") + header + "'");
        }
        if (!next.empty() && next[0] != '#') {
            add(table, line);
        }
    }
    if (number == 0) {
        throw std::invalid_argument("backend map: empty table");
    }
    check(table);
    return table;
}
