// The rules, one per operator: whether a node's shape, type and parameters follow from its sources as ggml.c makes
// them. The sources that it cannot do without are there (rpc_operators.cpp has the table).
#pragma once

#include "rpc_shapes.h"

namespace oa_rpc {

// rpc_rules_rows.cpp
bool binary(tensor node);
bool add_id(tensor node);
bool unary(tensor node);
bool glu(tensor node);
bool group_norm(tensor node);
bool row_by_row(tensor node);
bool sum(tensor node);
bool sum_rows(tensor node);
bool argmax(tensor node);
bool argsort(tensor node);
bool top_k(tensor node);
bool repeat(tensor node);
bool concat(tensor node);
bool mul_mat(tensor node);
bool mul_mat_id(tensor node);
bool out_prod(tensor node);
bool set(tensor node);
bool copy(tensor node);
bool get_rows(tensor node);
bool set_rows(tensor node);
bool diag(tensor node);
bool diag_mask(tensor node);
bool arange(tensor node);
bool triangle(tensor node);
bool fill(tensor node);
bool solve_tri(tensor node);

// rpc_rules_window.cpp
bool im2col(tensor node);
bool conv_2d(tensor node);
bool conv_2d_dw(tensor node);
bool conv_transpose_1d(tensor node);
bool conv_transpose_2d(tensor node);
bool col2im_1d(tensor node);
bool pool_1d(tensor node);
bool pool_2d(tensor node);
bool upscale(tensor node);
bool pad(tensor node);
bool pad_reflect_1d(tensor node);
bool roll(tensor node);
bool timestep_embedding(tensor node);

// rpc_rules_state.cpp
bool soft_max(tensor node);
bool rope(tensor node);
bool flash_attention(tensor node);
bool ssm_conv(tensor node);
bool ssm_scan(tensor node);
bool wkv6(tensor node);
bool wkv7(tensor node);
bool gated_linear_attention(tensor node);
bool gated_delta_net(tensor node);
bool lightning_indexer(tensor node);
bool hc_comb(tensor node);
bool hc_pre(tensor node);
bool hc_post(tensor node);

} // namespace oa_rpc
