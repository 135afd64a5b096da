// The switch and the cables of a network testbed (python/oallama/netlab/lab.py): one TAP device in every namespace
// named on the command line, and between them a model of full-duplex Ethernet.
//
// A frame takes the sender's NIC (rate, bounded queue), the path of its pair (loss, rate, delay, jitter) and the
// receiver's NIC (rate, bounded queue). The switch cuts through: a frame alone pays for its length once.
// Invariants: a frame never arrives early; what finds a queue full is dropped; frames of a pair never overtake one
// another; a NIC queues frames in the order of arrival, whatever the order in which they were read.
// Lines on standard input change the model, each is answered by "ok" or by what is wrong (see Switch::obey). End of
// file, or the death of the parent, ends the program and with it the devices.

#include "frame.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <malloc.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <queue>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using netlab::Frame;
using nanoseconds = int64_t;

constexpr const char * device     = "eth0";
constexpr int          read_batch = 16; // frames of one host before the others have their turn

// A sleep ends up to 30 us late (KVM guest, AMD EPYC), so the last part of a wait is spent awake, unless frames follow
// one another so fast that it would be all the time.
constexpr nanoseconds spin  = 30000;
constexpr nanoseconds dense = 200000;

nanoseconds now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * nanoseconds(1000000000) + t.tv_nsec;
}

std::runtime_error failure(const std::string & what) {
    return std::runtime_error(what + ": " + strerror(errno));
}

// First and last bit of a frame at one point of its way.
struct Passage {
    nanoseconds first;
    nanoseconds last;
};

// Something that lets bits through at a rate, one frame at a time, behind a bounded queue.
struct Pipe {
    double      rate  = 0; // bit/s; 0: no limit
    double      queue = 0; // bytes that may wait
    nanoseconds free  = 0; // when the last bit of all accepted frames has left

    // Lets `bytes` through; false if they found the queue full.
    bool pass(Passage & at, uint32_t bytes) {
        if (rate == 0) {
            return true;
        }
        if (double(free - at.first) * rate > queue * 8e9) {
            return false;
        }
        at.first = std::max(at.first, free);
        free     = at.first + nanoseconds(bytes * 8e9 / rate);
        at.last  = std::max(at.last, free);
        return true;
    }
};

struct Host {
    int  tap = -1;
    bool up  = true; // the cable is in
    Pipe out, in;
};

struct Path {
    Pipe        pipe;
    nanoseconds delay = 0, jitter = 0;
    double      loss   = 0; // of each packet
    nanoseconds newest = 0; // when the last bit of the frame before arrives
};

using FramePtr = std::shared_ptr<const Frame>; // a broadcast has several receivers

struct Event {
    nanoseconds time;
    uint64_t    number; // equal times: first come, first served
    int         to;
    bool        queued; // has passed the receiver's NIC
    Passage     at;
    FramePtr    frame;

    bool operator<(const Event & other) const { return time != other.time ? time > other.time : number > other.number; }
};

// A TAP device in the named namespace. It hands over TCP in frames of 64 KiB, which is what makes 10 Gbit/s possible.
int open_tap(const std::string & name) {
    const int space = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) {
        throw failure("namespace " + name);
    }
    close(space);
    const int tap     = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    ifreq     request = {};
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    if (tap < 0 || ioctl(tap, TUNSETIFF, &request) != 0 || ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) {
        throw failure("TAP device");
    }
    return tap;
}

class Switch {
  public:
    explicit Switch(const std::vector<std::string> & namespaces) : hosts(namespaces.size()) {
        paths.assign(hosts.size(), std::vector<Path>(hosts.size()));
        const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        for (size_t i = 0; i < hosts.size(); ++i) {
            hosts[i].tap = open_tap(namespaces[i]);
        }
        if (home < 0 || setns(home, CLONE_NEWNET) != 0) {
            throw failure("own namespace");
        }
        close(home);
    }

    void run() {
        const int           parent = int(syscall(SYS_pidfd_open, getppid(), 0)); // -1: poll skips it
        std::vector<pollfd> fds    = { { STDIN_FILENO, POLLIN, 0 }, { parent, POLLIN, 0 } };
        for (const Host & host : hosts) {
            fds.push_back({ host.tap, POLLIN, 0 });
        }
        while (true) {
            wait(fds);
            if (fds[1].revents || (fds[0].revents && !read_commands())) {
                return;
            }
            for (size_t i = 0; i < hosts.size(); ++i) {
                if (fds[i + 2].revents) {
                    read_frames(int(i));
                }
            }
            deliver_due();
        }
    }

  private:
    void wait(std::vector<pollfd> & fds) const {
        timespec         time  = {};
        const timespec * limit = nullptr;
        if (!events.empty()) {
            const nanoseconds next  = events.top().time;
            const nanoseconds awake = next - delivered > dense ? spin : 0;
            const nanoseconds left  = std::max<nanoseconds>(0, next - awake - now());
            time                    = { left / 1000000000, left % 1000000000 };
            limit                   = &time;
        }
        if (ppoll(fds.data(), fds.size(), limit, nullptr) < 0) {
            throw failure("ppoll");
        }
    }

    void read_frames(int from) {
        for (int i = 0; i < read_batch; ++i) {
            char *        data = static_cast<char *>(malloc(netlab::max_frame_size));
            const ssize_t size = read(hosts[from].tap, data, netlab::max_frame_size);
            if (size < ssize_t(netlab::min_frame_size)) {
                free(data);
                return;
            }
            send(from, std::make_shared<Frame>(static_cast<char *>(realloc(data, size)), uint32_t(size)));
        }
    }

    // The number of a host is in the last two bytes of its address: nothing has to be learned.
    void send(int from, const FramePtr & frame) {
        const uint8_t *   address = frame->destination();
        const size_t      number  = address[4] * 256 + address[5];
        const nanoseconds time    = now();
        Passage           at      = { time, time };
        if (!hosts[from].up || !hosts[from].out.pass(at, frame->wire())) {
            return;
        }
        for (size_t to = 0; to < hosts.size(); ++to) {
            if (int(to) != from && (address[0] & 1 || to == number)) {
                lose_some(paths[from][to], int(to), at, frame);
            }
        }
    }

    // Each packet of a large frame has its own luck; what is left between two losses travels on as one frame.
    void lose_some(Path & path, int to, Passage at, const FramePtr & frame) {
        const uint32_t packets = frame->packets();
        uint32_t       begin   = 0;
        for (uint32_t i = 0; i <= packets && path.loss > 0; ++i) {
            const bool lost = i < packets && std::uniform_real_distribution<>()(random) < path.loss;
            if (lost || (i == packets && begin > 0)) {
                if (begin < i) {
                    const auto    time = [&](uint32_t n) { return at.first + (at.last - at.first) * n / packets; };
                    const Passage part = { time(begin), time(i) };
                    travel(path, to, part, std::make_shared<Frame>(frame->slice(begin, i - begin)));
                }
                begin = i + 1;
            }
        }
        if (begin == 0) {
            travel(path, to, at, frame);
        }
    }

    void travel(Path & path, int to, Passage at, const FramePtr & frame) {
        if (!path.pipe.pass(at, frame->wire())) {
            return;
        }
        const nanoseconds jitter = std::uniform_int_distribution<nanoseconds>(-path.jitter, path.jitter)(random);
        const nanoseconds delay  = std::max(path.delay + jitter, path.newest - at.first);
        at                       = { at.first + delay, at.last + delay };
        path.newest              = at.last;
        events.push({ at.first, ++count, to, false, at, frame });
    }

    void deliver_due() {
        while (!events.empty() && events.top().time <= now()) {
            Event event = events.top();
            events.pop();
            Host & host = hosts[event.to];
            if (!event.queued) {
                if (host.in.pass(event.at, event.frame->wire())) {
                    event.time   = event.at.last;
                    event.number = ++count;
                    event.queued = true;
                    events.push(std::move(event));
                }
            } else {
                delivered = event.time;
                // A device that is down refuses the frame: it is lost, as on a real cable.
                if (host.up && write(host.tap, event.frame->data(), event.frame->size()) < 0) {
                    continue;
                }
            }
        }
    }

    // False at the end of the input.
    bool read_commands() {
        char          buffer[4096];
        const ssize_t size = read(STDIN_FILENO, buffer, sizeof(buffer));
        if (size <= 0) {
            return false;
        }
        input.append(buffer, size);
        for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
            printf("%s\n", obey(input.substr(0, end)).c_str());
            fflush(stdout);
        }
        return true;
    }

    // host I RATE QUEUE_OUT QUEUE_IN | path FROM TO RATE QUEUE DELAY JITTER LOSS | cable I 0/1; bit/s, bytes,
    // nanoseconds.
    std::string obey(const std::string & line) {
        std::istringstream fields(line);
        std::string        word;
        size_t             i = 0;
        fields >> word >> i;
        if (!fields || i >= hosts.size()) {
            return "bad host in '" + line + "'";
        }
        Host & host = hosts[i];
        if (word == "host") {
            fields >> host.out.rate >> host.out.queue >> host.in.queue;
            host.in.rate = host.out.rate;
        } else if (word == "path") {
            size_t to = hosts.size();
            fields >> to;
            if (!fields || to >= hosts.size()) {
                return "bad host in '" + line + "'";
            }
            Path & path = paths[i][to];
            fields >> path.pipe.rate >> path.pipe.queue >> path.delay >> path.jitter >> path.loss;
        } else if (word == "cable") {
            int up = 0;
            fields >> up;
            host.up = up != 0;
            if (ioctl(host.tap, TUNSETCARRIER, &up) != 0) {
                return failure("TUNSETCARRIER").what();
            }
        } else {
            return "unknown command '" + line + "'";
        }
        return fields ? "ok" : "bad number in '" + line + "'";
    }

    std::vector<Host>              hosts;
    std::vector<std::vector<Path>> paths; // [from][to]
    std::priority_queue<Event>     events;
    uint64_t                       count     = 0;
    nanoseconds                    delivered = 0; // when the last frame was due
    std::mt19937_64                random;        // the same losses in every run
    std::string                    input;
};

} // namespace

int main(int argc, char ** argv) {
    try {
        Switch network(std::vector<std::string>(argv + 1, argv + argc));
        prctl(PR_SET_TIMERSLACK, 1);
        mallopt(M_TRIM_THRESHOLD, 256 << 20); // else each frame gets fresh memory, which the kernel has to clear
        // A switch does not wait until the ranks of a collective yield the CPU.
        const sched_param priority = { 1 };
        if (sched_setscheduler(0, SCHED_RR, &priority) != 0) {
            fprintf(stderr, "netlab: no real-time priority (%s): delays grow on a busy machine\n", strerror(errno));
        }
        printf("ok\n");
        fflush(stdout);
        network.run();
    } catch (const std::exception & error) {
        printf("%s\n", error.what());
        return 1;
    }
    return 0;
}
