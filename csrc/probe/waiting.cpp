#include "waiting.h"

#include <cstdio>

#ifdef __linux__
#include <dirent.h>
#endif

double oa_waited_s() {
    double waited_s = 0.0;
#ifdef __linux__
    DIR * tasks = opendir("/proc/self/task");
    while (const dirent * task = tasks ? readdir(tasks) : nullptr) {
        char name[300];
        std::snprintf(name, sizeof(name), "/proc/self/task/%s/schedstat", task->d_name);
        if (FILE * file = task->d_name[0] == '.' ? nullptr : std::fopen(name, "r")) {
            unsigned long long ran_ns = 0, waited_ns = 0;
            if (std::fscanf(file, "%llu %llu", &ran_ns, &waited_ns) == 2) {
                waited_s += 1e-9 * double(waited_ns);
            }
            std::fclose(file);
        }
    }
    if (tasks) {
        closedir(tasks);
    }
#endif
    return waited_s;
}
