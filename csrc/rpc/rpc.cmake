# What patch 0009 adds to ggml-rpc; the fuzz targets are made of the same.
set(OALLAMA_RPC_SOURCES
    ${OALLAMA_CSRC}/rpc/rpc_auth.cpp
    ${OALLAMA_CSRC}/rpc/rpc_check.cpp
    ${OALLAMA_CSRC}/rpc/rpc_client.cpp
    ${OALLAMA_CSRC}/rpc/rpc_door.cpp
    ${OALLAMA_CSRC}/rpc/rpc_handshake.cpp
    ${OALLAMA_CSRC}/rpc/rpc_limit.cpp
    ${OALLAMA_CSRC}/rpc/rpc_operators.cpp
    ${OALLAMA_CSRC}/rpc/rpc_rules_rows.cpp
    ${OALLAMA_CSRC}/rpc/rpc_rules_state.cpp
    ${OALLAMA_CSRC}/rpc/rpc_rules_window.cpp
    ${OALLAMA_CSRC}/rpc/rpc_socket.cpp
    ${OALLAMA_CSRC}/rpc/rpc_supervisor.cpp
    ${OALLAMA_CSRC}/rpc/rpc_worker.cpp
    ${OALLAMA_UPSTREAM}/vendor/hash/sha256/sha256.c)
