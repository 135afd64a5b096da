// Kernels that are compiled for several instruction sets, of which a process takes one.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace oa {

// What all CPUs with AVX2, and all with AVX-512, have that our kernels are compiled for. All with AVX2 have the rest of
// x86-64-v3 (F16C, BMI, LZCNT, MOVBE), whose names not all compilers know.
#if defined(__x86_64__)
inline bool cpu_has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

inline bool cpu_has_avx512() {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
}
#endif

// Whether OALLAMA_INSTRUCTIONS leaves a set to our kernels: it names the largest that they may take by themselves.
inline bool may_take(const char * name) {
    static const char * const sets[]   = { "base", "avx2", "avx-vnni", "avx512", "amx" };
    const auto                position = [](const char * set) {
        return std::find_if(std::begin(sets), std::end(sets), [set](auto * each) { return !std::strcmp(each, set); });
    };
    const char * const largest = std::getenv("OALLAMA_INSTRUCTIONS");
    if (!largest || !*largest) {
        return true;
    }
    if (position(largest) == std::end(sets)) {
        GGML_ABORT("OALLAMA_INSTRUCTIONS is base, avx2, avx-vnni, avx512 or amx, got %s", largest);
    }
    return position(name) <= position(largest);
}

// Kernels: a struct with `name`. The first of `by_speed` that the CPU has is taken, unless one is asked for.
template <class Kernels> class KernelChoice {
  public:
    using Test = bool (*)(const Kernels &);

    // is_default: whether it may be taken without being asked for.
    KernelChoice(std::initializer_list<const Kernels *> by_speed, Test has, Test is_default) :
        by_speed_(by_speed), has_(has), is_default_(is_default) {}

    const Kernels & get() {
        if (const Kernels * known = chosen_.load(std::memory_order_relaxed)) {
            return *known;
        }
        const auto found = std::find_if(by_speed_.begin(), by_speed_.end(), [this](auto * each) {
            return has_(*each) && is_default_(*each) && may_take(each->name);
        });
        chosen_.store(*found, std::memory_order_relaxed);
        return **found;
    }

    // The number of those that are taken, from 1 on.
    uint32_t number() {
        const auto found = std::find(by_speed_.begin(), by_speed_.end(), &get());
        return uint32_t(found - by_speed_.begin()) + 1;
    }

    // Takes those of that name, or for "" the default again. False where the CPU lacks them or none have that name.
    bool use(const char * name) {
        const auto named = std::find_if(by_speed_.begin(), by_speed_.end(),
                                        [name](auto * each) { return !std::strcmp(each->name, name); });
        if (named == by_speed_.end()) {
            chosen_ = nullptr;
            return !*name;
        }
        if (has_(**named)) {
            chosen_ = *named;
        }
        return has_(**named);
    }

  private:
    std::vector<const Kernels *> by_speed_;
    Test                         has_, is_default_;
    std::atomic<const Kernels *> chosen_{ nullptr };
};

} // namespace oa
