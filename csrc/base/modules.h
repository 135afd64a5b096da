// Backends that are modules: libraries beside libggml, of which each process loads what fits its machine.
// docs/wheels.md.
#pragma once

#ifdef GGML_BACKEND_DL
// Loads the backends beside libggml, once, of the CPU's the one that this CPU profits from most; then those in the
// folders of OALLAMA_MODULES (separated by colons). Called whenever the registry is asked. Returns true.
bool oa_load_modules();
#else
inline bool oa_load_modules() {
    return false; // the backends are linked
}
#endif
