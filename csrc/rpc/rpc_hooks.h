// What patch 0009 calls. Bodies: supervisor (rpc_supervisor.cpp, rpc_door.cpp), worker (rpc_worker.cpp), client
// (rpc_client.cpp), checks of messages (rpc_check.cpp, rpc_rules_*.cpp).
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>

// ---- ggml-rpc-server -----------------------------------------------------------------------------------------------

// Reads --listen and --isolate and takes them out of argv, refuses what is not safe, and supervises where wanted.
// Returns the exit status of the program, or -1: go on and serve (with upstream's rules, or as a worker).
extern "C" int oa_rpc_server_main(int * argc, char ** argv);

// ---- transport -----------------------------------------------------------------------------------------------------

// In a worker: the socket that stands for the listening one; else -1.
int oa_rpc_worker_socket();

// May this process listen itself? Not on other addresses than loopback, and not where a token is asked for.
bool oa_rpc_may_listen(const char * host);

// After accept(): in a worker waits for the next client; else makes the connection notice a lost peer.
void oa_rpc_accepted(int * fd);

// Before and after connect().
void oa_rpc_connecting(int fd);
bool oa_rpc_connected(int fd, const char * host, int port); // false never returns: see rpc_client.cpp

// ---- client --------------------------------------------------------------------------------------------------------

// Is a weight of this size looked for in the server's cache first? OALLAMA_RPC_HASH_BYTES; upstream's limit without it.
bool oa_rpc_hashes(size_t size);

// Says hello to the server at host:port and asks for its devices, within `timeout_s`.
// Throws std::runtime_error with one line for the user.
using oa_rpc_hello_t = void (*)(const char * endpoint, double timeout_s);
void oa_rpc_hello(const char * endpoint, double timeout_s);

// ---- checks in the server; false with a line in the log -------------------------------------------------------------

using oa_rpc_buffers = std::unordered_set<ggml_backend_buffer_t>;

// Longest message of variable size: a graph, or what the buffers of this client take.
bool oa_rpc_check_message(uint64_t size);
// Before a buffer is made, and how many bytes there are then.
bool oa_rpc_check_alloc(ggml_backend_t backend, uint64_t size);
void oa_rpc_buffer_made(ggml_backend_buffer_t buffer);
void oa_rpc_buffer_freed(ggml_backend_buffer_t buffer);
// A tensor as it came (ggml-rpc.cpp's rpc_tensor), before any of its values is used.
bool oa_rpc_check_tensor(const void * rpc_tensor, size_t size, const oa_rpc_buffers & buffers);
// Bytes [offset, offset + size) of a tensor with a buffer.
bool oa_rpc_check_range(const ggml_tensor * tensor, uint64_t offset, uint64_t size);
bool oa_rpc_check_copy(const ggml_tensor * src, const ggml_tensor * dst);
// What a backend may write behind the tensor when it initialises it.
bool oa_rpc_check_init(const ggml_tensor * tensor);
bool oa_rpc_check_alloc_size(const ggml_tensor * tensor);
bool oa_rpc_check_graph(uint64_t n_nodes, uint64_t n_tensors, size_t message_size);
// Sources come before what is made of them: no cycles, no deep recursion.
bool oa_rpc_check_sources(const void * rpc_tensor, const std::unordered_map<uint64_t, ggml_tensor *> & made);
// The next node of a graph: its operator, its sources, where they lie.
bool oa_rpc_check_node(ggml_backend_t backend, const ggml_cgraph * graph, const ggml_tensor * node);

// Puts a file into the cache of weights whole or not at all.
void oa_rpc_cache_write(const char * path, const void * data, size_t size);
// Does a cached file of that size stand for what is asked for?
bool oa_rpc_cache_fits(const ggml_tensor * tensor, uint64_t offset, size_t size);
