#include "rpc_operators.h"

#include "rpc_rules.h"

namespace oa_rpc {

namespace {

struct rule {
    int n_sources; // that must be there
    bool (*fits)(tensor node);
};

// Operators of inference. Without a rule, and so refused: training, and those that call a function whose address comes
// in the message (MAP_CUSTOM, CUSTOM).
rule rule_of(ggml_op op) {
    switch (op) {
        case GGML_OP_DUP:
        case GGML_OP_CONT: return { 1, copy };
        case GGML_OP_CPY: return { 2, copy };
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV: return { 2, binary };
        case GGML_OP_ADD_ID: return { 3, add_id };
        case GGML_OP_ACC:
        case GGML_OP_SET: return { 2, set };
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_LOG:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_CUMSUM:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM: return { 1, like_first };
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_LEAKY_RELU: return { 1, row_by_row };
        case GGML_OP_GROUP_NORM: return { 1, group_norm };
        case GGML_OP_UNARY: return { 1, unary };
        case GGML_OP_GLU: return { 1, glu };
        case GGML_OP_SUM: return { 1, sum };
        case GGML_OP_SUM_ROWS:
        case GGML_OP_MEAN: return { 1, sum_rows };
        case GGML_OP_ARGMAX: return { 1, argmax };
        case GGML_OP_ARGSORT: return { 1, argsort };
        case GGML_OP_TOP_K: return { 1, top_k };
        case GGML_OP_REPEAT: return { 1, repeat };
        case GGML_OP_CONCAT: return { 2, concat };
        case GGML_OP_MUL_MAT: return { 2, mul_mat };
        case GGML_OP_MUL_MAT_ID: return { 3, mul_mat_id };
        case GGML_OP_OUT_PROD: return { 2, out_prod };
        case GGML_OP_GET_ROWS: return { 2, get_rows };
        case GGML_OP_SET_ROWS: return { 3, set_rows };
        case GGML_OP_DIAG: return { 1, diag };
        case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_DIAG_MASK_ZERO: return { 1, diag_mask };
        case GGML_OP_SOFT_MAX: return { 1, soft_max };
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return { 2, rope };
        case GGML_OP_IM2COL: return { 2, im2col };
        case GGML_OP_CONV_2D: return { 2, conv_2d };
        case GGML_OP_CONV_2D_DW: return { 2, conv_2d_dw };
        case GGML_OP_CONV_TRANSPOSE_1D: return { 2, conv_transpose_1d };
        case GGML_OP_CONV_TRANSPOSE_2D: return { 2, conv_transpose_2d };
        case GGML_OP_COL2IM_1D: return { 1, col2im_1d };
        case GGML_OP_POOL_1D: return { 1, pool_1d };
        case GGML_OP_POOL_2D: return { 1, pool_2d };
        case GGML_OP_UPSCALE: return { 1, upscale };
        case GGML_OP_PAD: return { 1, pad };
        case GGML_OP_PAD_REFLECT_1D: return { 1, pad_reflect_1d };
        case GGML_OP_ROLL: return { 1, roll };
        case GGML_OP_TIMESTEP_EMBEDDING: return { 1, timestep_embedding };
        case GGML_OP_ARANGE: return { 0, arange };
        case GGML_OP_TRI: return { 1, triangle };
        case GGML_OP_FILL: return { 1, fill };
        case GGML_OP_FLASH_ATTN_EXT: return { 3, flash_attention };
        case GGML_OP_SSM_CONV: return { 2, ssm_conv };
        case GGML_OP_SSM_SCAN: return { 7, ssm_scan };
        case GGML_OP_RWKV_WKV6: return { 6, wkv6 };
        case GGML_OP_RWKV_WKV7: return { 7, wkv7 };
        case GGML_OP_GATED_LINEAR_ATTN: return { 5, gated_linear_attention };
        case GGML_OP_GATED_DELTA_NET: return { 6, gated_delta_net };
        case GGML_OP_SOLVE_TRI: return { 2, solve_tri };
        case GGML_OP_LIGHTNING_INDEXER: return { 4, lightning_indexer };
        case GGML_OP_DSV4_HC_COMB: return { 3, hc_comb };
        case GGML_OP_DSV4_HC_PRE: return { 2, hc_pre };
        case GGML_OP_DSV4_HC_POST: return { 3, hc_post };
        default: return { 0, nullptr };
    }
}

} // namespace

bool has_sources(const ggml_tensor * node) {
    const rule known = rule_of(node->op);
    for (int i = 0; i < known.n_sources; ++i) {
        if (!node->src[i]) {
            return false;
        }
    }
    return known.fits != nullptr;
}

bool fits_sources(const ggml_tensor * node) {
    return rule_of(node->op).fits(node);
}

} // namespace oa_rpc
