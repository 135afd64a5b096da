#include "weight_window.h"

#include "ggml-impl.h"
#include "host_memory.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace {

constexpr size_t written_at_most = 32 << 20; // bytes of weights in memory while they are loaded
constexpr double cached_share    = 0.85;     // of the memory that is left, for weights in the page cache

struct range {
    uintptr_t first;
    uintptr_t end;
};

using ranges = std::vector<range>;

struct area {
    void * base;
    size_t size;
    int    file;
    size_t written; // since it was given back
};

const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));

// ---- the thread that reads ahead -----------------------------------------------------------------------------------

class reader {
  public:
    void ask(const ranges & wanted) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { work(); });
        }
        wanted_ = std::move(wanted);
        some_.notify_one();
    }

    ~reader() {
        if (thread_.joinable()) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                stop_ = true;
                some_.notify_one();
            }
            thread_.join();
        }
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            some_.wait(lock, [this] { return stop_ || !wanted_.empty(); });
            if (stop_) {
                return;
            }
            const ranges now = std::move(wanted_);
            wanted_.clear();
            lock.unlock();
            for (const range & r : now) {
                const uintptr_t first = r.first / page * page;
                // Older kernels do not know it: then the computation itself reads what it needs.
                (void) madvise(reinterpret_cast<void *>(first), r.end - first, MADV_POPULATE_READ);
            }
            lock.lock();
        }
    }

    std::mutex              mutex_;
    std::condition_variable some_;
    ranges                  wanted_;
    bool                    stop_ = false;
    std::thread             thread_;
};

// Which piece follows which, as they did before. A piece is known by its first weight.
class succession {
  public:
    // The pieces go on with this one; what followed it, null at the first time.
    const ranges * go_on(const ranges & piece) {
        if (last_) {
            after_[last_] = piece;
        }
        last_           = piece.front().first;
        const auto next = after_.find(last_);
        return next == after_.end() ? nullptr : &next->second;
    }

  private:
    std::map<uintptr_t, ranges> after_;
    uintptr_t                   last_ = 0;
};

struct window {
    std::map<uintptr_t, area> areas;         // by their end
    int                       n_sharing = 0; // ranks that share the host's memory, 0: it has room for all weights
    std::map<uintptr_t, bool> leaves;        // whether the page cache gives a piece back after each use
    double                    due = 0;       // bytes that should leave and do not
    succession                all, those_that_leave;
    std::mutex                order; // of the above: contexts may compute side by side
    int                       n_backends = 0;
    reader                    ahead;

    decltype(ggml_backend_i::graph_compute) compute = nullptr;
    decltype(ggml_backend_i::free)          free    = nullptr;
};

window & the() {
    static window w;
    return w;
}

// ---- buffers -------------------------------------------------------------------------------------------------------

area & of(ggml_backend_buffer_t buffer) {
    return the().areas.at(reinterpret_cast<uintptr_t>(buffer->context) + buffer->size);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    munmap(of(buffer).base, of(buffer).size);
    close(of(buffer).file);
    the().areas.erase(reinterpret_cast<uintptr_t>(buffer->context) + buffer->size);
}

void * get_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

void count(ggml_backend_buffer_t buffer, size_t nbytes) {
    area & a = of(buffer);
    a.written += nbytes;
    if (a.written >= written_at_most) {
        madvise(a.base, a.size, MADV_DONTNEED); // of a shared mapping: the file has it
        a.written = 0;
    }
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    count(buffer, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    count(buffer, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
    count(buffer, buffer->size);
}

constexpr ggml_backend_buffer_i buffer_interface = {
    free_buffer, get_base, nullptr, memset_tensor, set_tensor, get_tensor, nullptr, nullptr, nullptr, clear, nullptr,
};

// A file without a name, on a disk.
int open_file(size_t size) {
    const char *      given  = std::getenv("OALLAMA_RANK_FOLDER");
    const std::string folder = given && *given ? given : "/var/tmp";
    const int         file   = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    struct statfs     system = {};
    if (file < 0 || fstatfs(file, &system) != 0) {
        throw std::runtime_error("cannot make a file for weights in " + folder + ": " + std::strerror(errno));
    }
    if (system.f_type == TMPFS_MAGIC || (size && posix_fallocate(file, 0, off_t(size)) != 0)) {
        close(file);
        throw std::runtime_error(folder + " has no room for weights on a disk (" + std::to_string(size >> 20) +
                                 " MiB); name another folder in OALLAMA_RANK_FOLDER");
    }
    return file;
}

ggml_backend_buffer_type_t real_of(ggml_backend_buffer_type_t buft) {
    return static_cast<ggml_backend_buffer_type_t>(buft->context);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (the().n_backends > 0) { // KV cache and compute buffers, and the weights of any further model
        return ggml_backend_buft_alloc_buffer(real_of(buft), size);
    }
    const size_t whole = (size + page - 1) / page * page;
    int          file  = -1;
    try {
        file = open_file(whole);
    } catch (const std::exception & error) {
        GGML_LOG_ERROR("oallama: %s\n", error.what());
        return nullptr;
    }
    void * base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) {
        close(file);
        return nullptr;
    }
    the().areas[reinterpret_cast<uintptr_t>(base) + size] = { base, whole, file, 0 };
    return ggml_backend_buffer_init(buft, buffer_interface, base, size);
}

const char * buft_name(ggml_backend_buffer_type_t) {
    return "window";
}

size_t get_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(real_of(buft));
}

bool is_host(ggml_backend_buffer_type_t) {
    return true;
}

constexpr ggml_backend_buffer_type_i buft_interface = {
    buft_name, alloc_buffer, get_alignment, nullptr, nullptr, is_host,
};

// ---- computing -----------------------------------------------------------------------------------------------------

// Where the weights that a graph reads lie, in the order of their addresses, neighbours as one.
ranges weights_of(const ggml_cgraph * graph) {
    ranges found;
    for (int i = 0; i < graph->n_nodes; ++i) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (src && src->data) {
                const auto first = reinterpret_cast<uintptr_t>(src->data), end = first + ggml_nbytes(src);
                const auto it = the().areas.lower_bound(end);
                if (it != the().areas.end() && first >= reinterpret_cast<uintptr_t>(it->second.base)) {
                    found.push_back({ first, end });
                }
            }
        }
    }
    std::sort(found.begin(), found.end(), [](const range & a, const range & b) { return a.first < b.first; });
    ranges merged;
    for (const range & r : found) {
        if (!merged.empty() && r.first <= merged.back().end + page) {
            merged.back().end = std::max(merged.back().end, r.end);
        } else {
            merged.push_back(r);
        }
    }
    return merged;
}

// Of the weights, that the page cache cannot keep; asked when everything else has been allocated.
double share_to_leave() {
    static const double share = [] {
        double weights = 0;
        for (const auto & [end, a] : the().areas) {
            weights += double(a.size);
        }
        const int    n    = the().n_sharing;
        const double room = n > 0 ? cached_share * double(oa_host_memory()) / n : weights;
        return std::max(0.0, 1 - room / weights);
    }();
    return share;
}

size_t bytes_of(const ranges & reads) {
    size_t total = 0;
    for (const range & r : reads) {
        total += r.end - r.first;
    }
    return total;
}

// Pieces that leave lie evenly between those that stay, so that computing one hides reading another. Without this the
// kernel drops what was used longest ago, and that is what is used next.
bool leaves(const ranges & reads) {
    window & w              = the();
    const auto [it, is_new] = w.leaves.try_emplace(reads.front().first, false);
    if (is_new) {
        const double nbytes = double(bytes_of(reads));
        w.due += nbytes * share_to_leave();
        it->second = w.due >= nbytes / 2;
        w.due -= it->second ? nbytes : 0.0;
    }
    return it->second;
}

// Unmaps a piece. A page that is shared with a neighbour goes too: it comes back by itself.
void give_back(const ranges & reads, bool from_cache) {
    for (const range & r : reads) {
        const uintptr_t first = r.first / page * page;
        madvise(reinterpret_cast<void *>(first), r.end - first, MADV_DONTNEED);
        if (from_cache) {
            const area & a = the().areas.lower_bound(r.end)->second;
            posix_fadvise(a.file, off_t(first - reinterpret_cast<uintptr_t>(a.base)), off_t(r.end - first),
                          POSIX_FADV_DONTNEED);
        }
    }
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    window &     w     = the();
    const ranges reads = weights_of(graph);
    if (reads.empty()) {
        return w.compute(backend, graph);
    }
    bool is_leaving = false;
    {
        std::lock_guard<std::mutex> lock(w.order);
        is_leaving = leaves(reads);
        if (const ranges * next = w.all.go_on(reads); next && !leaves(*next)) {
            w.ahead.ask(*next);
        }
        if (const ranges * next = is_leaving ? w.those_that_leave.go_on(reads) : nullptr) {
            w.ahead.ask(*next);
        }
    }
    const ggml_status status = w.compute(backend, graph);
    give_back(reads, is_leaving);
    return status;
}

void free_backend(ggml_backend_t backend) {
    --the().n_backends;
    the().free(backend);
}

} // namespace

void oa_window_check() {
    close(open_file(0));
}

void oa_window_share(int n_ranks) {
    the().n_sharing = n_ranks;
}

ggml_backend_buffer_type_t oa_window_buffer_type(ggml_backend_dev_t dev, ggml_backend_buffer_type_t real) {
    static ggml_backend_buffer_type type = { buft_interface, dev, real };
    return &type;
}

void oa_window_watch(ggml_backend_t backend) {
    window & w = the();
    ++w.n_backends;
    w.compute                    = backend->iface.graph_compute;
    w.free                       = backend->iface.free;
    backend->iface.graph_compute = graph_compute;
    backend->iface.free          = free_backend;
}
