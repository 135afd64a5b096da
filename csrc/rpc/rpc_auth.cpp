#include "rpc_auth.h"

extern "C" {
#include "sha256.h"
}

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <stdexcept>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

namespace oa_rpc {

namespace {

constexpr size_t BLOCK           = 64; // of SHA-256
constexpr size_t MAX_TOKEN_BYTES = 4096;

digest sha256(const std::vector<uint8_t> & first, const void * second, size_t size) {
    sha256_t state;
    digest   result;
    sha256_init(&state);
    sha256_update(&state, first.data(), first.size());
    sha256_update(&state, static_cast<const unsigned char *>(second), size);
    sha256_final(&state, result.data());
    return result;
}

std::vector<uint8_t> padded(const token & key, uint8_t with) {
    std::vector<uint8_t> block(BLOCK, 0);
    if (key.size() > BLOCK) {
        const digest hashed = sha256({}, key.data(), key.size());
        std::memcpy(block.data(), hashed.data(), hashed.size());
    } else if (!key.empty()) {
        std::memcpy(block.data(), key.data(), key.size());
    }
    for (uint8_t & byte : block) {
        byte ^= with;
    }
    return block;
}

const char * set_variable(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

} // namespace

digest hmac_sha256(const token & key, const std::string & message) {
    const digest inner = sha256(padded(key, 0x36), message.data(), message.size());
    return sha256(padded(key, 0x5c), inner.data(), inner.size());
}

bool same(const digest & a, const digest & b) {
    volatile uint8_t different = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        different = different | (a[i] ^ b[i]);
    }
    return different == 0;
}

digest random_bytes() {
    digest result;
    size_t have = 0;
    while (have < result.size()) {
        const ssize_t n = getrandom(result.data() + have, result.size() - have, 0);
        if (n < 0 && errno != EINTR) {
            throw std::runtime_error(std::string("no random numbers from the system: ") + std::strerror(errno));
        }
        have += n > 0 ? size_t(n) : 0;
    }
    return result;
}

token read_token(const char * path) {
    const std::string name = std::string("the token file ") + path;
    const int         fd   = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat       info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        const std::string why = std::strerror(errno);
        if (fd >= 0) {
            close(fd);
        }
        throw std::runtime_error(name + " cannot be read: " + why);
    }
    token         result(MAX_TOKEN_BYTES + 1);
    const ssize_t n = S_ISREG(info.st_mode) ? read(fd, result.data(), result.size()) : -1;
    close(fd);
    if (n < 0 || size_t(n) > MAX_TOKEN_BYTES) {
        throw std::runtime_error(name + " is not a readable file of at most 4096 bytes");
    }
    if (info.st_mode & (S_IRWXG | S_IRWXO)) {
        throw std::runtime_error(name + " may be used by others than its owner: chmod 600 " + path);
    }
    result.resize(size_t(n));
    while (!result.empty() && std::strchr(" \t\r\n", result.back()) && result.back() != 0) {
        result.pop_back();
    }
    if (result.size() < MIN_TOKEN_BYTES) {
        throw std::runtime_error(name + " has " + std::to_string(result.size()) + " bytes; expected at least " +
                                 std::to_string(MIN_TOKEN_BYTES) + " (openssl rand -hex 32)");
    }
    return result;
}

token own_token() {
    const char * path = set_variable("OALLAMA_RPC_TOKEN_FILE");
    return path ? read_token(path) : token();
}

token token_for(const std::string & endpoint) {
    const char *       open = set_variable("OALLAMA_RPC_NO_TOKEN");
    std::istringstream listed(open ? open : "");
    for (std::string one; std::getline(listed, one, ',');) {
        if (one == endpoint) {
            return {};
        }
    }
    return own_token();
}

} // namespace oa_rpc
