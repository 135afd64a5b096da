#include "host_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace {

constexpr size_t unlimited = SIZE_MAX;

// The number behind `key` in a file of lines "key number"; `missing` without it.
size_t find_number(const std::string & path, const std::string & key, size_t missing) {
    std::ifstream file(path);
    std::string   name;
    size_t        value = 0;
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        if (fields >> name >> value && name == key) {
            return value;
        }
    }
    return missing;
}

// The one number of a file; `unlimited` for "max" or without the file.
size_t read_number(const std::string & path) {
    std::ifstream file(path);
    size_t        value = 0;
    return file >> value ? value : unlimited;
}

// What one control group leaves. Its page cache is given back under pressure.
size_t group_memory(const std::string & folder, const char * limit_name, const char * used_name, const char * cache) {
    const size_t limit = read_number(folder + "/" + limit_name);
    const size_t used  = read_number(folder + "/" + used_name);
    if (limit == unlimited || used == unlimited) {
        return unlimited;
    }
    const std::string prefix = cache;
    const size_t      file   = find_number(folder + "/memory.stat", prefix + "active_file", 0) +
                        find_number(folder + "/memory.stat", prefix + "inactive_file", 0);
    const size_t taken = used - std::min(used, file);
    return limit - std::min(limit, taken);
}

// A group and all above it.
size_t groups_memory(const std::string & root, std::string path, const char * limit, const char * used,
                     const char * cache) {
    size_t least = unlimited;
    while (true) {
        least = std::min(least, group_memory(root + path, limit, used, cache));
        if (path.empty()) {
            return least;
        }
        path.erase(path.rfind('/'));
    }
}

size_t control_groups_memory() {
    std::ifstream file("/proc/self/cgroup");
    size_t        least = unlimited;
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        std::string       path        = line.substr(second + 1);
        path                          = path == "/" ? "" : path;
        if (controllers == ",,") {
            least = std::min(least, groups_memory("/sys/fs/cgroup", path, "memory.max", "memory.current", ""));
        } else if (controllers.find(",memory,") != std::string::npos) {
            least = std::min(least, groups_memory("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                                                  "memory.usage_in_bytes", "total_"));
        }
    }
    return least;
}

} // namespace

size_t oa_host_memory() {
    if (const char * text = std::getenv("OALLAMA_HOST_MEMORY")) {
        return size_t(std::strtoull(text, nullptr, 10));
    }
    const size_t available = find_number("/proc/meminfo", "MemAvailable:", 0); // KiB
    return std::min(available ? available * 1024 : unlimited, control_groups_memory());
}
