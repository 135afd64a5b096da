#include "region.h"

#include "clock.h"
#include "futex.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace oa::weave {

namespace {

// One byte of the file per side; a lock belongs to the open file, so a process may hold both.
flock lock_of(Side side) {
    flock lock    = {};
    lock.l_type   = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start  = side == Side::receiver ? 0 : 1;
    lock.l_len    = 1;
    return lock;
}

// A process that was killed keeps its locks for a while when others look at its memory (/proc/PID/smaps).
constexpr double grace_s = 2.0;

const char * const in_use = " is in use by another receiver";

std::string reason() {
    return strerror(errno);
}

size_t whole_pages(size_t nbytes) {
    return (nbytes + 4095) / 4096 * 4096;
}

} // namespace

Region Region::create(const std::string & path, uint32_t n_slots, size_t task_nbytes, size_t result_nbytes) {
    if (n_slots == 0 || (n_slots & (n_slots - 1)) != 0) {
        throw ChannelError("a channel has a power of two of slots, not " + std::to_string(n_slots));
    }
    clear_path(path);
    // Without a name until it is complete: nobody finds a file that nobody has locked yet.
    const size_t      slash  = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    const int         file   = open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (file < 0) {
        throw ChannelError("cannot make " + path + ": " + reason());
    }
    Region region(Side::receiver, file, "");
    task_nbytes         = whole_pages(line + task_nbytes);
    result_nbytes       = whole_pages(line + result_nbytes);
    const size_t nbytes = first_slot + n_slots * (task_nbytes + result_nbytes);
    if (!region.lock(Side::receiver)) {
        throw ChannelError("cannot make " + path + ": " + reason());
    }
    // All of it now: a page that cannot be had later is a signal to who writes there.
    if (const int error = posix_fallocate(file, 0, off_t(nbytes))) {
        throw ChannelError("cannot make " + path + " of " + std::to_string(nbytes) + " bytes: " + strerror(error));
    }
    region.map(nbytes);
    Header & header      = region.header_;
    header.magic         = magic;
    header.version       = version;
    header.boot          = (uint64_t(std::random_device()()) << 32) | std::random_device()();
    header.region_nbytes = nbytes;
    header.tasks         = first_slot;
    header.results       = first_slot + n_slots * task_nbytes;
    header.task_nbytes   = task_nbytes;
    header.result_nbytes = result_nbytes;
    header.n_slots       = n_slots;
    header.pid           = uint32_t(getpid());
    memcpy(region.data_, &header, sizeof(header));
    const std::string unnamed = "/proc/self/fd/" + std::to_string(file);
    if (linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
        throw ChannelError(errno == EEXIST ? path + in_use : "cannot make " + path + ": " + reason());
    }
    region.path_ = path;
    return region;
}

// Senders of a receiver that is gone keep their mapping of its file.
void Region::clear_path(const std::string & path) {
    const double end = oa_now() + grace_s;
    for (int old; (old = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)) >= 0;) {
        const Region of_another(Side::receiver, old, ""); // closes it
        struct stat  locked, named;
        if (of_another.lock(Side::receiver)) {
            // Who held the lock until now may have put a file of its own there.
            const bool same = fstat(old, &locked) == 0 && lstat(path.c_str(), &named) == 0 &&
                              locked.st_dev == named.st_dev && locked.st_ino == named.st_ino;
            if (same) {
                unlink(path.c_str());
                return;
            }
        }
        if (oa_now() > end) {
            throw ChannelError(path + in_use);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

Region Region::attach(const std::string & path) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) {
        throw ChannelError(errno == ENOENT ? "no receiver at " + path : "cannot open " + path + ": " + reason());
    }
    Region      region(Side::sender, file, "");
    struct stat about;
    if (fstat(file, &about) != 0 || about.st_uid != geteuid() || (about.st_mode & 077) != 0) {
        throw ChannelError(path + " belongs to another user, or others may open it");
    }
    if (size_t(about.st_size) < first_slot) {
        throw ChannelError(path + " is no channel");
    }
    region.map(size_t(about.st_size));
    memcpy(&region.header_, region.data_, sizeof(Header));
    const Header & header = region.header_;
    if (header.magic != magic) {
        throw ChannelError(path + " is no channel");
    }
    if (header.version != version) {
        throw ChannelError(path + ": the receiver speaks version " + std::to_string(header.version) +
                           " of the protocol, this sender " + std::to_string(version));
    }
    const size_t all_tasks = header.n_slots * header.task_nbytes, all_results = header.n_slots * header.result_nbytes;
    const bool   sound = header.n_slots > 0 && header.n_slots <= 64 && (header.n_slots & (header.n_slots - 1)) == 0 &&
                       header.task_nbytes > line && header.task_nbytes <= header.region_nbytes &&
                       header.result_nbytes > line && header.result_nbytes <= header.region_nbytes &&
                       header.tasks == first_slot && header.results == first_slot + all_tasks &&
                       header.region_nbytes == header.results + all_results;
    if (!sound || header.region_nbytes != size_t(about.st_size)) {
        throw ChannelError(path + " is damaged");
    }
    if (!region.other_lives()) {
        throw ChannelError("the receiver of " + path + " is gone");
    }
    if (!region.lock(Side::sender)) {
        throw ChannelError(path + " has a sender already");
    }
    return region;
}

Region::Region(Region && other) noexcept :
    side_(other.side_), file_(std::exchange(other.file_, -1)), path_(std::exchange(other.path_, "")),
    data_(std::exchange(other.data_, nullptr)), nbytes_(other.nbytes_), header_(other.header_) {}

Region::~Region() {
    if (!path_.empty()) {
        unlink(path_.c_str());
    }
    if (data_) {
        munmap(data_, nbytes_);
    }
    if (file_ >= 0) {
        close(file_);
    }
}

void Region::map(size_t nbytes) {
    void * data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (data == MAP_FAILED) {
        throw ChannelError("cannot map " + std::to_string(nbytes) + " bytes of shared memory: " + reason());
    }
    data_   = static_cast<char *>(data);
    nbytes_ = nbytes;
}

bool Region::lock(Side side) const {
    flock lock = lock_of(side);
    return fcntl(file_, F_OFD_SETLK, &lock) == 0;
}

bool Region::other_lives() const {
    flock lock = lock_of(side_ == Side::sender ? Side::receiver : Side::sender);
    return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

TaskHeader * Region::task(uint32_t slot) const {
    return reinterpret_cast<TaskHeader *>(data_ + header().tasks + slot * header().task_nbytes);
}

ResultHeader * Region::result(uint32_t slot) const {
    return reinterpret_cast<ResultHeader *>(data_ + header().results + slot * header().result_nbytes);
}

void Region::wait(size_t word, uint32_t seen, double seconds) const {
    oa_futex_wait(*reinterpret_cast<std::atomic<uint32_t> *>(data_ + word), seen, seconds);
}

void Region::wake(size_t word) const {
    oa_futex_wake(*reinterpret_cast<std::atomic<uint32_t> *>(data_ + word));
}

} // namespace oa::weave
