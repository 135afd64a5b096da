// Variables of the environment for single models of llama-server's router: OALLAMA_MODEL_ENVIRONMENTS is
// {"model": {"NAME": "value", ..}, ..}; they take the place of the router's own. Hook of patch 0011.
#pragma once

#include <algorithm>
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
        const std::string begin = name + "=";
        environment.erase(std::remove_if(environment.begin(), environment.end(),
                                         [&](const std::string & old) { return old.rfind(begin, 0) == 0; }),
                          environment.end());
        environment.push_back(begin + value.get<std::string>());
    }
}
