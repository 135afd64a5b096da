// The kernels, for the instruction set that the including file is compiled for: dots.h for few query rows, columns.h
// and tiles.h for many, words.h for caches of bytes, item.h for what they share. Sums are f32 in all but words.h.
#pragma once

#include "item_columns.h"
#include "item_rows.h"
#include "item_tiles.h"

namespace {

void compute_item(const Task & task, const Place & at, float * scratch, float * partials, Worked worked) {
    Item item(task, at, scratch);
    item.run(worked);
    item.write(partials);
}

void run_item(const Task & task, int64_t number, float * scratch, float * partials, Worked worked) {
    const Place at = place_of(task, number);
    if (task.method == Method::tiles) {
        [[maybe_unused]] const TileShapes shapes;
        compute_item(task, at, scratch, partials, worked);
    } else {
        compute_item(task, at, scratch, partials, worked);
    }
}

} // namespace
