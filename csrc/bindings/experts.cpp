#include "bindings.h"
#include "chosen_experts.h"
#include "model_experts.h"
#include "slot_policy.h"
#include "tensor_places.h"

#include <algorithm>
#include <pybind11/numpy.h>

namespace {

py::list take(oa_expert_watch & watch) {
    py::list result;
    for (const auto & chosen : watch.take()) {
        py::array_t<int32_t> ids({ chosen.n_tokens, chosen.n_used });
        std::copy(chosen.ids.begin(), chosen.ids.end(), ids.mutable_data());
        result.append(py::make_tuple(chosen.layer, ids));
    }
    return result;
}

py::dict places(const std::string & path) {
    oa_file_outline outline;
    {
        py::gil_scoped_release release;
        outline = oa_tensor_places(path);
    }
    py::list tensors;
    for (const auto & t : outline.tensors) {
        tensors.append(py::make_tuple(t.name, t.ne, t.offset, t.nbytes));
    }
    py::dict d;
    d["arch"]    = outline.arch;
    d["n_parts"] = outline.n_parts;
    d["tensors"] = tensors;
    return d;
}

py::list counts_of(uintptr_t context) {
    py::list result;
    for (const oa_expert_counts & c : oa_expert_counts_of(llama_get_model((const llama_context *) context))) {
        result.append(py::make_tuple(c.layer, c.uses, c.hits, c.uploads, c.uploaded_nbytes));
    }
    return result;
}

using token_ids = py::array_t<int32_t, py::array::c_style | py::array::forcecast>; // [tokens, used]

// Slots of a layer that are filled at once behind each token: (hits, uploads) of each.
std::vector<std::pair<int, int>> replay(const token_ids & ids, int64_t n_experts, size_t n_slots,
                                        const std::string & policy, double margin, int uploads) {
    py::gil_scoped_release alone; // layers are replayed at once

    const oa_slot_rules  rules{ policy == "lru" ? oa_slot_policy::lru : oa_slot_policy::lfru, margin };
    oa_expert_uses       uses(n_experts);
    std::vector<oa_slot> slots(n_slots);

    std::vector<std::pair<int, int>> found;
    for (py::ssize_t token = 0; token < ids.shape(0); ++token) {
        const std::vector<int32_t> now(ids.data(token, 0), ids.data(token, 0) + ids.shape(1));
        const auto                 hits = std::count_if(slots.begin(), slots.end(), [&](const oa_slot & slot) {
            return std::find(now.begin(), now.end(), slot.expert) != now.end();
        });
        uses.add(now.data(), int64_t(now.size()));
        int n_moved = 0;
        for (; uploads < 0 || n_moved < uploads; ++n_moved) {
            const auto change = oa_best_slot_change(uses, slots, now, rules);
            if (!change) {
                break;
            }
            slots[change->slot].expert = change->expert;
        }
        found.emplace_back(int(hits), n_moved);
    }
    return found;
}

} // namespace

void register_experts(py::module_ & m) {
    py::class_<oa_expert_watch>(m, "ExpertWatch",
                                "Notes the experts that routers choose. It must outlive the contexts it watches.")
        .def(py::init<>())
        .def_property_readonly(
            "addresses",
            [](oa_expert_watch & watch) {
                return py::make_tuple(uintptr_t(&oa_expert_watch::callback), uintptr_t(&watch));
            },
            "For llama_context_params: cb_eval and cb_eval_user_data.")
        .def("take", &take, "What was chosen so far as (layer, ids [tokens, used]), in order; empties the list.");
    m.def("expert_counts", &counts_of, py::arg("context"),
          "Of the model of a live llama_context (its address), by layer with divided experts: (layer, uses, hits, "
          "uploads, uploaded bytes) of decode since it was loaded.");
    m.def("replay_slots", &replay, py::arg("ids"), py::arg("n_experts"), py::arg("n_slots"), py::arg("policy") = "lfru",
          py::arg("margin") = oa_slot_rules().margin, py::arg("uploads") = -1,
          "(hits, uploads) behind each token of a layer's choices, ids [tokens, used], by the engine's policy, where "
          "uploads take no time; at most so many a token, -1: any number.");
    m.def("set_slots_seam", &oa_set_slots_seam, py::arg("delay_us") = 0, py::arg("fails_in") = -1,
          py::arg("unordered") = false, py::arg("at_random") = false,
          "For tests: delays around uploads of experts, one that fails, tables that change too early, random experts.");
    m.def("tensor_places", &places, py::arg("path"),
          "Of a GGUF file {arch, n_parts, tensors}: each tensor as (name, ne, offset in the file, bytes).");
}
