#include "bindings.h"
#include "weight_stream.h"

namespace {

py::list lanes() {
    py::list result;
    for (const auto & lane : oa_stream_lanes()) {
        py::dict d;
        d["device"]         = lane.device;
        d["slots_nbytes"]   = lane.slots_nbytes;
        d["pinned_nbytes"]  = lane.pinned_nbytes;
        d["pin_limit"]      = lane.pin_limit;
        d["staging_pinned"] = lane.staging_pinned;
        d["note"]           = lane.note;
        result.append(d);
    }
    return result;
}

} // namespace

void register_streams(py::module_ & m) {
    m.def(
        "stream_lanes", &lanes,
        "Every device that weights are streamed to: bytes of its slots and of pinned host memory, and why weights are "
        "not (all) copied from there.");
    m.def("take_stream_error", &oa_stream_take_error,
          "Why the last computation failed in a weight stream; empty if it did not, and the second time.");
}
