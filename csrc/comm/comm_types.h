/* The words of the all-reduce that cross the C ABI: element types, algorithms, wire formats. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

enum oa_dtype { OA_F32 = 0, OA_F16 = 1, OA_BF16 = 2 };

/* What each does is said in algorithms.h. */
enum oa_algorithm {
    OA_AUTO         = 0, /* what oa_choose() finds fastest */
    OA_STAR         = 1,
    OA_TREE         = 2,
    OA_EXCHANGE     = 3,
    OA_RABENSEIFNER = 4,
    OA_PIPELINED    = 5
};

/* Between hosts: the values themselves, or (f32 only) blocks of 32 in 34 bytes. */
enum oa_wire_format { OA_WIRE_NATIVE = 0, OA_WIRE_Q8 = 1 };

#ifdef __cplusplus
}
#endif
