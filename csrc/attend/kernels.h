// The kernels, for the instruction set that the including file is compiled for: dots.h for few query rows, columns.h
// for many, item.h for what both share. Sums are f32 in all.
#pragma once

#include "item.h"

namespace {

void run_item(const Task & task, int64_t number, float * scratch, float * partials, Worked worked) {
    const Place at = place_of(task, number);
    Item        item(task, at, scratch);
    item.run(worked);
    item.write(partials);
}

} // namespace
