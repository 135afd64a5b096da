#include "schedule.h"

#include <algorithm>

void oa_schedule::begin(const oa_wire & wire, size_t chunk, int depth) {
    wire_     = wire;
    n_opened_ = n_started_ = n_finished_ = 0;
    flights_.resize(size_t(depth));
    for (flight & f : flights_) {
        f.pending.assign(size_t(n_phases()), 0);
        f.inbox.resize(std::max(f.inbox.size(), inbox_size(chunk)));
        if (wire.format != OA_WIRE_NATIVE) {
            f.outbox.resize(std::max(f.outbox.size(), outbox_size(chunk)));
        }
    }
}

void oa_schedule::open(char * result, size_t n) {
    flight & f = at(n_opened_++);
    f.result   = result;
    f.n        = n;
    f.phase    = -1;
    post(f);
}

void oa_schedule::start(const char * sum) {
    flight & f = at(n_started_++);
    f.sum      = sum;
    f.phase    = 0;
    enter(f, 0);
}

bool oa_schedule::poll() {
    tickets_.clear();
    bool moved = net_.poll(tickets_);
    for (const int ticket : tickets_) {
        flight & f = flights_[size_t(ticket / n_phases())];
        --f.pending[size_t(ticket % n_phases())];
    }
    while (advance()) {
        moved = true;
    }
    return moved;
}

bool oa_schedule::advance() {
    bool moved = false;
    for (int chunk = n_finished_; chunk < n_started_; ++chunk) {
        flight &   f        = at(chunk);
        const bool in_order = chunk == n_finished_ || at(chunk - 1).phase > f.phase;
        if (f.phase < n_phases() && f.pending[size_t(f.phase)] == 0 && in_order) {
            moved = true;
            if (++f.phase < n_phases()) {
                enter(f, f.phase);
            } else {
                finish(f);
            }
        }
    }
    while (n_finished_ < n_started_ && at(n_finished_).phase == n_phases()) {
        ++n_finished_;
    }
    return moved;
}

template <typename F> void oa_schedule::in_pieces(flight & f, int phase, size_t size, F && post) {
    const int ticket = int(&f - flights_.data()) * n_phases() + phase;
    size_t    at     = 0;
    do { // nothing is a message, too: the other host sees which operation this one is at
        const size_t piece = std::min(OA_LARGEST_MESSAGE, size - at);
        ++f.pending[size_t(phase)];
        post(at, piece, ticket);
        at += piece;
    } while (at < size);
}

void oa_schedule::send(flight & f, int phase, oa_direction direction, int host, const char * data, size_t size) {
    in_pieces(f, phase, size, [&](size_t at, size_t piece, int ticket) {
        net_.send(direction, group_.ranks[size_t(host)], data + at, piece, ticket);
    });
}

void oa_schedule::receive(flight & f, int phase, oa_direction direction, int host, char * data, size_t size) {
    in_pieces(f, phase, size, [&](size_t at, size_t piece, int ticket) {
        net_.receive(direction, group_.ranks[size_t(host)], data + at, piece, ticket);
    });
}
