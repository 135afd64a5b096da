// The rules, one per operator: whether a node's shape, type and parameters follow from its sources as ggml.c makes
// them. The sources that it cannot do without are there (rpc_operators.cpp has the table).
#pragma once

#include "rpc_shapes.h"

namespace oa_rpc {

// rpc_rules_rows.cpp
bool binary(t node);
bool add_id(t node);
bool unary(t node);
bool glu(t node);
bool group_norm(t node);
bool sum(t node);
bool sum_rows(t node);
bool argmax(t node);
bool argsort(t node);
bool top_k(t node);
bool repeat(t node);
bool concat(t node);
bool mul_mat(t node);
bool mul_mat_id(t node);
bool out_prod(t node);
bool set(t node);
bool copy(t node);
bool get_rows(t node);
bool set_rows(t node);
bool diag(t node);
bool diag_mask(t node);
bool arange(t node);
bool triangle(t node);
bool fill(t node);
bool solve_tri(t node);

// rpc_rules_window.cpp
bool im2col(t node);
bool conv_2d(t node);
bool conv_2d_dw(t node);
bool conv_transpose_1d(t node);
bool conv_transpose_2d(t node);
bool col2im_1d(t node);
bool pool_1d(t node);
bool pool_2d(t node);
bool upscale(t node);
bool pad(t node);
bool pad_reflect_1d(t node);
bool roll(t node);
bool timestep_embedding(t node);

// rpc_rules_state.cpp
bool soft_max(t node);
bool rope(t node);
bool flash_attention(t node);
bool ssm_conv(t node);
bool ssm_scan(t node);
bool wkv6(t node);
bool wkv7(t node);
bool gated_linear_attention(t node);
bool gated_delta_net(t node);
bool lightning_indexer(t node);
bool hc_comb(t node);
bool hc_pre(t node);
bool hc_post(t node);

} // namespace oa_rpc
