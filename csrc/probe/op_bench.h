// Profiler of target operators and attention: one shape on one device, many repeats inside one graph over rotating
// copies larger than the caches (decode reads cold weights). Timed from the host around whole graphs: timing single
// GPU operators from the host overstates them 1.7 to 3 times. Memory of intermediate results is shared as in a real
// graph; what does not fit the device's free memory is not tried.
#pragma once

#include "bench_backend.h"
#include "bench_cases.h"

#include <cstdint>
#include <new>

// Of a measurement that the device's free memory cannot hold.
class oa_no_room : public std::bad_alloc {
  public:
    explicit oa_no_room(std::string what) : what_(std::move(what)) {}

    const char * what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

// Whether a buffer type of `device` repacks such a weight for its operator. Throws std::invalid_argument for an unknown
// device or type.
bool oa_repacks(const std::string & device, const oa_mul_mat_spec & spec);

// Whether our kernels compute products of weights of this type on `device`. Errors as above.
bool oa_tiles(const std::string & device, const std::string & type);

// Whether `device` has every operator of this attention. Errors as above.
bool oa_attends(const std::string & device, const oa_attention_spec & spec);

class oa_op_bench {
  public:
    // `cold_bytes`: size the rotating copies must exceed together (16 times the last-level cache is a good choice).
    oa_op_bench(const std::string & device, int n_threads, bool use_extra_bufts, size_t cold_bytes);

    // Throw std::invalid_argument for an unknown type, oa_no_room, and std::runtime_error if the device lacks the
    // operator or the realisation.
    oa_timing mul_mat(const oa_mul_mat_spec & spec, double max_s);
    oa_timing attention(const oa_attention_spec & spec, double max_s);
    oa_timing small(const oa_small_spec & spec, double max_s);
    oa_timing chain(const oa_chain_spec & spec, double max_s);
    oa_timing node(const oa_node_spec & spec, double max_s);

    // Name of the buffer type the last weight lay in ("CPU_REPACK").
    const std::string & buffer_type() const { return buffer_type_; }

    // Whether memory was too short for all the copies that keep the last one's operands cold.
    bool warm() const { return warm_; }

  private:
    // Copies of the operands that a case reads from cold memory.
    struct cold_copies {
        std::string      of; // types and shapes of the operands, and where they lie; "": other cases may not read them
        ggml_context_ptr context;
        ggml_backend_buffer_ptr  buffer;
        std::vector<oa_operands> copies;
    };

    // The parts of a case that all its graphs use.
    struct prepared;
    // A graph with its tensors in memory.
    struct loaded;

    oa_timing measure(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type, double max_s);
    prepared  prepare(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type);
    void      make_cold(const oa_bench_case & which, ggml_backend_buffer_type_t cold_type, int n_copies);
    loaded    load(const oa_bench_case & which, prepared & made, int n_ops) const;
    double    one_repeat_s(const oa_bench_case & which, prepared & made) const;
    void      compute(const loaded & graph) const;

    ggml_backend_dev_t device_;
    ggml_backend_ptr   backend_;
    bool               use_extra_bufts_;
    size_t             cold_bytes_;
    cold_copies        cold_; // of the last case
    std::string        buffer_type_;
    bool               warm_ = false;
    oa_patience        patience_;
};
