// Variables of the environment for single models of llama-server's router: OALLAMA_MODEL_ENVIRONMENTS is
// {"model": {"NAME": "value", ..}, ..}. Hook of patch 0010.
#pragma once

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

inline void oa_child_environment(const std::string & model, std::vector<std::string> & environment) {
    const char * all = getenv("OALLAMA_MODEL_ENVIRONMENTS");
    if (!all) {
        return;
    }
    const auto given = nlohmann::json::parse(all).value(model, nlohmann::json::object());
    for (const auto & [name, value] : given.items()) {
        environment.push_back(name + "=" + value.get<std::string>());
    }
}
