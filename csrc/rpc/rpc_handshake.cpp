#include "rpc_handshake.h"

#include <cstring>
#include <stdexcept>

namespace oa_rpc {

namespace {

template <typename T> std::string raw(const T & value) {
    return std::string(reinterpret_cast<const char *>(&value), sizeof(value));
}

digest answer_mac(const token & key, const challenge & asked, const answer & given) {
    return hmac_sha256(key, "oallama rpc client" + raw(asked) + raw(given.wanted) + raw(given.number));
}

digest verdict_mac(const token & key, const challenge & asked, const answer & given, status is) {
    return hmac_sha256(key, "oallama rpc server" + raw(asked) + raw(given) + raw(is));
}

} // namespace

challenge make_challenge() {
    challenge made;
    std::memcpy(made.magic, MAGIC, MAGIC_BYTES);
    made.number = random_bytes();
    return made;
}

answer make_answer(const token & key, const challenge & asked, wish wanted) {
    answer made = {};
    std::memcpy(made.magic, MAGIC, MAGIC_BYTES);
    made.wanted = wanted;
    made.number = random_bytes();
    made.mac    = answer_mac(key, asked, made);
    return made;
}

bool is_right(const token & key, const challenge & asked, const answer & given) {
    const bool known = std::memcmp(given.magic, MAGIC, MAGIC_BYTES) == 0;
    return same(given.mac, answer_mac(key, asked, given)) && known && !key.empty();
}

verdict make_verdict(const token & key, const challenge & asked, const answer & given, status is) {
    verdict made = {};
    made.is      = is;
    if (is != status::refused) { // nothing to guess the token by for those who do not have it
        made.mac = verdict_mac(key, asked, given, is);
    }
    return made;
}

void greet(wire & connection, const token & key, const std::string & peer, wish wanted, void (*queued)(const char *)) {
    challenge asked;
    try {
        connection.read(&asked, sizeof(asked));
    } catch (const closed &) {
        throw turned_away(peer + " closed the connection: too many failed attempts from here, or no server of ours");
    } catch (const std::runtime_error & error) {
        throw std::runtime_error(peer +
                                 " asks for no token, but OALLAMA_RPC_TOKEN_FILE is set here; if it needs none: "
                                 "OALLAMA_RPC_NO_TOKEN=host:port (" +
                                 error.what() + ")");
    }
    if (std::memcmp(asked.magic, MAGIC, MAGIC_BYTES) != 0) {
        throw std::runtime_error(peer + " is not an RPC server of oallama, or one of another version");
    }
    const answer given = make_answer(key, asked, wanted);
    connection.write(&given, sizeof(given));
    while (true) {
        verdict said;
        connection.read(&said, sizeof(said));
        if (said.is == status::refused) {
            throw std::runtime_error(peer + " does not accept the token in OALLAMA_RPC_TOKEN_FILE");
        }
        if (!same(said.mac, verdict_mac(key, asked, given, said.is))) {
            throw std::runtime_error(peer + " does not know the token in OALLAMA_RPC_TOKEN_FILE: not our server");
        }
        if (said.is == status::welcome) {
            return;
        }
        if (said.is != status::queued) {
            throw std::runtime_error(peer + " is busy with another client");
        }
        if (queued) {
            queued(peer.c_str());
        }
    }
}

} // namespace oa_rpc
