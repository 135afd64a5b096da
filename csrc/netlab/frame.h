// A frame as a TAP device gives and takes it: virtio header, Ethernet, payload. TCP over IPv4 comes in frames of up to
// 64 KiB, to be cut into packets by the "hardware"; packet counts and cable lengths are those of the cut frame.
#pragma once

#include <arpa/inet.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace netlab {

// linux/virtio_net.h is not C++ in every distribution.
struct VirtioHeader {
    uint8_t  flags;
    uint8_t  gso_type; // 0: one packet
    uint16_t header_length;
    uint16_t gso_size;   // TCP payload of each packet
    uint16_t csum_start; // where TCP starts in the frame
    uint16_t csum_offset;
};

constexpr uint32_t ethernet_size  = 14;
constexpr uint32_t max_frame_size = sizeof(VirtioHeader) + ethernet_size + 65536;
constexpr uint32_t min_frame_size = sizeof(VirtioHeader) + ethernet_size;

class Frame {
  public:
    // Takes over `data`, from malloc.
    Frame(char * data, uint32_t size) : data_(data), size_(size) {
        VirtioHeader header;
        memcpy(&header, data, sizeof(header));
        const uint32_t tcp = sizeof(header) + header.csum_start;
        if (header.gso_type != 0 && header.gso_size != 0 && tcp + 20 <= size) {
            head_    = std::min(size, tcp + 4 * (uint8_t(data[tcp + 12]) >> 4));
            gso_     = header.gso_size;
            tcp_     = tcp;
            packets_ = std::max(1u, (size - head_ + gso_ - 1) / gso_);
        }
    }

    const char * data() const { return data_.get(); }
    uint32_t     size() const { return size_; }
    uint32_t     packets() const { return packets_; }

    const uint8_t * destination() const { return reinterpret_cast<uint8_t *>(data_.get()) + sizeof(VirtioHeader); }

    // Bytes on the cable; each packet has headers of its own, and preamble, checksum and gap: 24 bytes.
    uint32_t wire() const {
        const uint32_t length = size_ - sizeof(VirtioHeader);
        if (packets_ == 1) {
            return std::max(length, 60u) + 24;
        }
        return length + (packets_ - 1) * (head_ - uint32_t(sizeof(VirtioHeader))) + packets_ * 24;
    }

    // Packets `first` to `first + count` of a frame that has more, as a frame of their own.
    Frame slice(uint32_t first, uint32_t count) const {
        const uint32_t from    = head_ + first * gso_;
        const uint32_t payload = std::min(size_ - from, count * gso_);
        char *         data    = static_cast<char *>(malloc(head_ + payload));
        memcpy(data, data_.get(), head_);
        memcpy(data + head_, data_.get() + from, payload);

        VirtioHeader header;
        memcpy(&header, data, sizeof(header));
        if (count == 1) {
            header.gso_type = 0;
            header.gso_size = 0;
        }
        memcpy(data, &header, sizeof(header));
        fix_ip(data + sizeof(header) + ethernet_size, head_ - sizeof(header) - ethernet_size + payload, first);
        fix_tcp(data, payload, first * gso_, first + count == packets_);
        return Frame(data, head_ + payload);
    }

  private:
    struct Freer {
        void operator()(char * p) const { free(p); }
    };

    static uint16_t get16(const char * p) {
        uint16_t value;
        memcpy(&value, p, 2);
        return ntohs(value);
    }

    static void put16(char * p, uint32_t value) {
        const uint16_t net = htons(uint16_t(value));
        memcpy(p, &net, 2);
    }

    // One's complement sum of 16-bit words.
    static uint32_t sum(const char * p, uint32_t n, uint32_t start) {
        for (uint32_t i = 0; i < n; i += 2) {
            start += get16(p + i);
        }
        start = (start & 0xffff) + (start >> 16);
        return (start & 0xffff) + (start >> 16);
    }

    static void fix_ip(char * ip, uint32_t length, uint32_t first) {
        put16(ip + 2, length);
        put16(ip + 4, get16(ip + 4) + first); // identification
        put16(ip + 10, 0);
        put16(ip + 10, ~sum(ip, 4 * (*ip & 15), 0));
    }

    void fix_tcp(char * data, uint32_t payload, uint32_t skipped, bool last) const {
        const char * ip  = data + sizeof(VirtioHeader) + ethernet_size;
        char *       tcp = data + tcp_;
        uint32_t     sequence;
        memcpy(&sequence, tcp + 4, 4);
        sequence = htonl(ntohl(sequence) + skipped);
        memcpy(tcp + 4, &sequence, 4);
        if (!last) {
            tcp[13] &= ~0x09; // FIN, PSH
        }
        if (skipped > 0) {
            tcp[13] &= ~0x80; // CWR
        }
        // The kernel has left the rest of the checksum to the hardware; the sum of addresses, protocol and length is
        // ours.
        put16(tcp + 16, sum(ip + 12, 8, IPPROTO_TCP + head_ - tcp_ + payload));
    }

    std::unique_ptr<char, Freer> data_;
    uint32_t                     size_;
    uint32_t                     packets_ = 1;
    // Of frames of more than one packet: size of all headers, payload of a packet, where TCP starts.
    uint32_t head_ = 0, gso_ = 0, tcp_ = 0;
};

} // namespace netlab
