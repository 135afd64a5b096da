#include "waiting.h"

#ifdef __linux__
#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace {

// Calls f with the folder of every thread of a process.
template <typename F> void for_each_thread(const std::string & process, const F & f) {
    const std::string folder = "/proc/" + process + "/task/";
    DIR *             tasks  = opendir(folder.c_str());
    while (const dirent * task = tasks ? readdir(tasks) : nullptr) {
        if (task->d_name[0] != '.') {
            f(folder + task->d_name);
        }
    }
    if (tasks) {
        closedir(tasks);
    }
}

// Ticks of a process, and of all that it has started, ended ones included.
double ticks_of(const std::string & process, bool with_children) {
    std::string line;
    std::getline(std::ifstream("/proc/" + process + "/stat"), line);
    // After the name, which may hold anything: the state is field 3, the four times are 14 to 17.
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    double             ticks = 0.0;
    std::string        field;
    for (int i = 3; i <= (with_children ? 17 : 15) && fields >> field; ++i) {
        ticks += i >= 14 ? std::stod(field) : 0.0;
    }
    if (!with_children) {
        return ticks;
    }
    for_each_thread(process, [&](const std::string & thread) {
        std::ifstream children(thread + "/children");
        for (std::string child; children >> child;) {
            ticks += ticks_of(child, true);
        }
    });
    return ticks;
}

} // namespace

double oa_waited_s() {
    double waited_s = 0.0;
    for_each_thread("self", [&](const std::string & thread) {
        unsigned long long ran_ns = 0, waited_ns = 0;
        if (std::ifstream(thread + "/schedstat") >> ran_ns >> waited_ns) {
            waited_s += 1e-9 * double(waited_ns);
        }
    });
    return waited_s;
}

double oa_others_s(bool children_are_ours) {
    std::ifstream stat("/proc/stat");
    std::string   name;
    double        user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
    if (!(stat >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal)) {
        return 0.0;
    }
    const double busy = user + nice + system + irq + softirq + steal;
    return (busy - ticks_of("self", children_are_ours)) / double(sysconf(_SC_CLK_TCK));
}
#else
double oa_waited_s() {
    return 0.0;
}

double oa_others_s(bool) {
    return 0.0;
}
#endif
