// Both sides of a channel of csrc/weave on numpy buffers, and what a process's contexts do with channels.
#include "bindings.h"
#include "clock.h"
#include "cpu_functions.h"
#include "guest_hooks.h"
#include "receiver_of_process.h"
#include "sender.h"

#include <optional>
#include <pybind11/numpy.h>

using namespace oa::weave;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Place  = std::pair<uint32_t, uint32_t>;                      // and its generation
using Given  = std::vector<std::tuple<Place, uint32_t, uint32_t>>; // a sequence, the position of its rows, how many

// A refusal is an answer; a receiver that has failed is an error.
Status checked(const Sender & sender, Status status) {
    if (sender.failed()) {
        throw ChannelError(sender.error());
    }
    return status;
}

std::optional<Place> open(Sender & sender, const OpenTask & wanted) {
    Handle handle = {};
    Status status;
    {
        py::gil_scoped_release release;
        status = sender.open(wanted, handle);
    }
    if (checked(sender, status) != Status::ok) {
        return std::nullopt;
    }
    return Place(handle.place, handle.generation);
}

bool resize(Sender & sender, Place place, uint32_t n_tokens, Status (Sender::*change)(Handle, uint32_t)) {
    Status status;
    {
        py::gil_scoped_release release;
        status = (sender.*change)({ place.first, place.second }, n_tokens);
    }
    return checked(sender, status) == Status::ok;
}

std::vector<SequenceRows> rows_of(const Given & sequences, const Floats & k) {
    std::vector<SequenceRows> rows;
    uint32_t                  n_rows = 0;
    for (const auto & [place, position, n] : sequences) {
        rows.push_back({ { place.first, place.second }, position, n });
        n_rows += n;
    }
    if (n_rows != uint32_t(k.shape(0))) {
        throw std::invalid_argument("the sequences have other rows than k and v");
    }
    return rows;
}

void append(Sender & sender, uint32_t layer, const Given & sequences, const Floats & k, const Floats & v) {
    if (k.ndim() != 3 || v.ndim() != 3 || k.shape(0) != v.shape(0) || k.shape(1) != v.shape(1) || k.size() == 0 ||
        v.size() == 0) {
        throw std::invalid_argument("k, v: [rows, heads, width] with the same rows and heads");
    }
    const auto rows         = rows_of(sequences, k);
    Attention  wanted       = {};
    wanted.task.layer       = layer;
    wanted.task.n_rows      = uint32_t(k.shape(0));
    wanted.task.n_sequences = uint32_t(rows.size());
    wanted.task.n_head_kv   = uint32_t(k.shape(1));
    wanted.task.d_k         = uint32_t(k.shape(2));
    wanted.task.d_v         = uint32_t(v.shape(2));
    wanted.task.n_chunks    = 1;
    wanted.rows             = rows.data();
    wanted.k                = k.data();
    wanted.v                = v.data();
    wanted.k_stride         = size_t(k.shape(1) * k.shape(2));
    wanted.v_stride         = size_t(v.shape(1) * v.shape(2));
    {
        py::gil_scoped_release release;
        sender.send(wanted);
    }
    checked(sender, Status::ok);
}

py::array_t<float> attend(Sender & sender, uint32_t layer, const Given & sequences, const Floats & q, const Floats & k,
                          const Floats & v, float scale, float max_bias, float softcap,
                          const std::optional<Floats> & sinks, bool tiled, uint32_t n_chunks, uint32_t n_padded,
                          uint32_t own) {
    if (q.ndim() != 3 || k.ndim() != 3 || v.ndim() != 3 || q.shape(0) != k.shape(0) || q.shape(0) != v.shape(0) ||
        q.shape(2) != k.shape(2) || k.shape(1) != v.shape(1) || q.size() == 0 || v.size() == 0 ||
        q.shape(1) % k.shape(1) != 0) {
        throw std::invalid_argument(
            "q, k, v: [rows, heads, width] with the same rows, widths of q and k and heads of k and v");
    }
    if (sinks && sinks->size() != q.shape(1)) {
        throw std::invalid_argument("sinks: one number per head of q");
    }
    const auto         rows = rows_of(sequences, k);
    py::array_t<float> out({ q.shape(0), q.shape(1), v.shape(2) });
    Attention          wanted = {};
    wanted.task               = { layer,
                                  uint32_t(q.shape(0)),
                                  uint32_t(rows.size()),
                                  uint32_t(q.shape(1)),
                                  uint32_t(k.shape(1)),
                                  uint32_t(k.shape(2)),
                                  uint32_t(v.shape(2)),
                                  scale,
                                  max_bias,
                                  softcap,
                                  0,
                                  tiled,
                                  n_chunks,
                                  n_padded,
                                  own };
    wanted.rows               = rows.data();
    wanted.sinks              = sinks ? sinks->data() : nullptr;
    wanted.q                  = q.data();
    wanted.k                  = k.data();
    wanted.v                  = v.data();
    wanted.q_stride           = size_t(q.shape(1) * q.shape(2));
    wanted.k_stride           = size_t(k.shape(1) * k.shape(2));
    wanted.v_stride           = size_t(v.shape(1) * v.shape(2));
    wanted.out                = out.mutable_data();
    {
        py::gil_scoped_release release;
        sender.send(wanted) && sender.receive();
    }
    checked(sender, Status::ok);
    return out;
}

py::dict receiver_stats(const GuestReceiver & receiver) {
    const ReceiverStats stats = receiver.stats();
    py::dict            d;
    d["n_tasks"]      = stats.n_tasks;
    d["n_refused"]    = stats.n_refused;
    d["n_items"]      = stats.n_items;
    d["n_epochs"]     = stats.n_epochs;
    d["n_looks"]      = stats.n_looks;
    d["n_drains"]     = stats.n_drains;
    d["quota_nbytes"] = stats.quota_nbytes;
    d["free_nbytes"]  = stats.free_nbytes;
    d["n_sequences"]  = stats.n_sequences;
    return d;
}

py::dict guest_stats(uintptr_t ctx) {
    const GuestStats stats = oa_weave_guest_stats(reinterpret_cast<llama_context *>(ctx));
    py::dict         d;
    d["n_guests"]   = stats.n_guests;
    d["n_lost"]     = stats.n_lost;
    d["n_rows"]     = stats.n_rows;
    d["n_appended"] = stats.n_appended;
    d["waited_s"]   = stats.waited_s;
    return d;
}

Polls polls_of(const std::string & name) {
    if (name != "graphs" && name != "operators" && name != "parts") {
        throw std::invalid_argument("polls: graphs, operators or parts, got " + name);
    }
    return name == "graphs" ? Polls::graphs : name == "operators" ? Polls::operators : Polls::parts;
}

void register_receiver(py::module_ & m) {
    py::class_<GuestReceiver, std::shared_ptr<GuestReceiver>>(m, "WeaveReceiver")
        .def(py::init([](const std::string & path, size_t quota_nbytes, size_t task_nbytes, size_t result_nbytes,
                         uint32_t n_slots, uint32_t n_idle, const std::string & polls, int64_t part) {
                 const ReceiverOptions options{ quota_nbytes, task_nbytes,     result_nbytes, n_slots,
                                                n_idle,       polls_of(polls), part };
                 return OA_OF_CPU(oa::weave::make_receiver)(path, options);
             }),
             py::arg("path"), py::arg("quota_nbytes"), py::arg("task_nbytes"), py::arg("result_nbytes"),
             py::arg("n_slots"), py::arg("n_idle"), py::arg("polls"), py::arg("part"), release_gil())
        .def("poll", &GuestReceiver::poll, release_gil())
        .def(
            "poll_seconds",
            [](GuestReceiver & receiver, int n_polls) {
                const double begin = oa_now();
                for (int i = 0; i < n_polls; ++i) {
                    receiver.poll();
                }
                return (oa_now() - begin) / n_polls;
            },
            py::arg("n_polls"), release_gil(), "Mean seconds of a poll that finds nothing.")
        .def("drain", &GuestReceiver::drain, py::arg("wanted"))
        .def("stats", &receiver_stats);
    m.def(
        "weave_set_receiver",
        [](std::shared_ptr<GuestReceiver> receiver) {
            const auto set = OA_OF_CPU(oa::weave::set_receiver);
            set(std::move(receiver));
        },
        py::arg("receiver").none(true), release_gil(),
        "Threads of this process's CPU graphs serve it; None: nobody's.");
}

void register_sender(py::module_ & m) {
    py::class_<Sender>(m, "WeaveSender")
        .def(py::init([](const std::string & path, double attach_s, double deadline_s, uint32_t base) {
                 return std::make_unique<Sender>(path, SenderOptions{ attach_s, deadline_s, base });
             }),
             py::arg("path"), py::arg("attach_s"), py::arg("deadline_s"), py::arg("base"), release_gil())
        .def_property_readonly("error", &Sender::error)
        .def_property_readonly("free_nbytes", &Sender::free_nbytes)
        .def_property_readonly("wants_guests", &Sender::wants_guests)
        .def_property_readonly("waited_s", &Sender::waited_s)
        .def("lives", &Sender::lives)
        .def(
            "open",
            [](Sender & self, uint32_t n_layers, uint32_t max_tokens, uint32_t k_type, uint32_t v_type,
               uint32_t k_width, uint32_t v_width) {
                return open(self, { n_layers, max_tokens, k_type, v_type, k_width, v_width });
            },
            py::arg("n_layers"), py::arg("max_tokens"), py::arg("k_type"), py::arg("v_type"), py::arg("k_width"),
            py::arg("v_width"))
        .def("reserve", [](Sender & self, Place at, uint32_t n) { return resize(self, at, n, &Sender::reserve); })
        .def("trim", [](Sender & self, Place at, uint32_t n) { return resize(self, at, n, &Sender::trim); })
        .def("attend", &attend, py::arg("layer"), py::arg("sequences"), py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("scale"), py::arg("max_bias"), py::arg("softcap"), py::arg("sinks"), py::arg("tiled"),
             py::arg("n_chunks"), py::arg("n_padded"), py::arg("own"))
        .def("append", &append, py::arg("layer"), py::arg("sequences"), py::arg("k"), py::arg("v"));
}

struct Field {
    const char * name;
    size_t       at, nbytes;
};

constexpr Field words[] = {
    { "epoch", word::epoch, sizeof(SenderPage::epoch.value) },
    { "base", word::base, sizeof(SenderPage::base.value) },
    { "tail", word::tail, sizeof(SenderPage::tail.value) },
    { "doorbell", word::doorbell, sizeof(SenderPage::doorbell.value) },
    { "tx_sleeping", word::tx_sleeping, sizeof(SenderPage::sleeping.value) },
    { "accepted", word::accepted, sizeof(ReceiverPage::accepted.value) },
    { "done", word::done, sizeof(ReceiverPage::done.value) },
    { "state", word::state, sizeof(ReceiverPage::state.value) },
    { "heartbeat", word::heartbeat, sizeof(ReceiverPage::heartbeat.value) },
    { "rx_sleeping", word::rx_sleeping, sizeof(ReceiverPage::sleeping.value) },
    { "free_nbytes", word::free_nbytes, sizeof(ReceiverPage::free_nbytes.value) },
};

constexpr Field header_fields[] = {
    { "magic", offsetof(Header, magic), sizeof(Header::magic) },
    { "version", offsetof(Header, version), sizeof(Header::version) },
    { "boot", offsetof(Header, boot), sizeof(Header::boot) },
    { "region_nbytes", offsetof(Header, region_nbytes), sizeof(Header::region_nbytes) },
    { "tasks", offsetof(Header, tasks), sizeof(Header::tasks) },
    { "task_nbytes", offsetof(Header, task_nbytes), sizeof(Header::task_nbytes) },
    { "n_slots", offsetof(Header, n_slots), sizeof(Header::n_slots) },
};

template <size_t n> py::dict places_of(const Field (&fields)[n]) {
    py::dict d;
    for (const Field & field : fields) {
        d[field.name] = py::make_tuple(field.at, field.nbytes);
    }
    return d;
}

} // namespace

void register_weave(py::module_ & m) {
    py::register_exception<ChannelError>(m, "ChannelError");
    register_receiver(m);
    register_sender(m);
    m.def(
        "weave_set_guests",
        [](const std::vector<std::string> & channels, int first_guest, double deadline_s) {
            GuestOptions options;
            options.channels          = channels;
            options.first_guest       = first_guest;
            options.sender.deadline_s = deadline_s;
            oa_weave_set_guests(options);
        },
        py::arg("channels"), py::arg("first_guest"), py::arg("deadline_s"),
        "Sequences from `first_guest` on, of contexts made after this, may be with the receivers at `channels`.");
    m.def(
        "weave_layout", [] { return py::make_tuple(places_of(words), places_of(header_fields), first_slot, line); },
        "Of a channel's file: offsets and sizes of its words, and of the header's; where slots begin; bytes of a "
        "line.");
    m.def("weave_guest_stats", &guest_stats, py::arg("ctx"), "Of a llama_context by its address.");
}
