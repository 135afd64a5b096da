// Backends that are modules: libraries beside libggml, of which each process loads what fits its machine.
// docs/wheels.md.
#pragma once

#ifdef GGML_BACKEND_DL
// Loads the backends beside libggml, once, and those in the folders of OALLAMA_MODULES (separated by colons). Of the
// CPU backends the one that this CPU profits from most. Called whenever the registry is asked. Returns true.
bool oa_load_modules();
#else
inline bool oa_load_modules() {
    return false; // the backends are linked
}
#endif
