// One CUDA device that ggml knows as two (GGML_CUDA_DEVICES=2): what tests/engine/test_virtual_devices.py compiles
// against a cuda_runtime.h of its own. Prints the names under which the second one's nodes are timed.
#include "cuda_check.h"
#include "op_timer_cuda.h"

#include <cstdio>

static void (*flush)();

bool oa_op_timer_enabled(void) {
    return true;
}

oa_op_time oa_op_timer_describe(const char * device, const ggml_tensor *) {
    return { device, "", "", "", 0.0 };
}

void oa_op_timer_record(oa_op_time record) {
    printf("%s\n", record.device.c_str());
}

void oa_op_timer_add_flush(void (*f)()) {
    flush = f;
}

int main() {
    const oa::weave::cuda::OnDevice here(oa::weave::cuda::card_of(1)); // throws where CUDA does not know the number

    const ggml_tensor node{};
    oa_op_timer_cuda(1, nullptr, nullptr); // a graph of the second begins
    oa_op_timer_cuda(1, nullptr, &node);
    oa_op_timer_cuda(0, nullptr, &node); // of the first: its own beginning is not there
    flush();
    return 0;
}
