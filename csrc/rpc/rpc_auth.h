// The shared token of RPC servers and clients, and what is computed with it.
// Source: HMAC is RFC 2104 over upstream's vendored SHA-256 (vendor/hash/sha256, public domain).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace oa_rpc {

using digest = std::array<uint8_t, 32>;
using token  = std::vector<uint8_t>; // empty: none

constexpr size_t MIN_TOKEN_BYTES = 16;

digest hmac_sha256(const token & key, const std::string & message);

// Takes the same time wherever they differ.
bool same(const digest & a, const digest & b);

// From the kernel's generator. Throws std::runtime_error when that fails.
digest random_bytes();

// The content of a file that only its owner may read, without white space at its end.
// Throws std::runtime_error: unreadable, readable by others, too short.
token read_token(const char * path);

// The token in the file that OALLAMA_RPC_TOKEN_FILE names; empty when the variable is not set. Throws as read_token.
token own_token();

// The same for a server we connect to: empty for endpoints that OALLAMA_RPC_NO_TOKEN lists.
token token_for(const std::string & endpoint);

} // namespace oa_rpc
