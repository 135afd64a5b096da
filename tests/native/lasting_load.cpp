// Looks at other programs' threads (csrc/base/lasting_load.h): lasting_load {SECONDS FOUND}... Prints the average after
// each look, which comes so many seconds after the one before.
#include "lasting_load.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char ** argv) {
    double average = 0.0;
    for (int i = 1; i + 1 < argc; i += 2) {
        average = oa_lasting_load(average, std::atof(argv[i]), std::atoi(argv[i + 1]));
        std::printf("%.4f\n", average);
    }
    return 0;
}
