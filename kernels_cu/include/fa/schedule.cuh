// Which tile of which head stands behind a number that a block takes from a counter (the persistent kernels).
#pragma once

#include <fa/types.cuh>

namespace fa {

struct Place {
    int tile, head;
};

// Sections of `section` of all `heads`, of `tiles` tiles each: in a section the first tile of each of its heads, then the second ones, and
// so on. So tiles in the order of their length, and few heads at a time in the L2 cache.
__device__ __forceinline__ Place place_in_sections(int number, int tiles, int section, int heads) {
    const int before = number / (tiles * section), inside = number - before * tiles * section;
    const int width = min(section, heads - before * section);  // the last section may have fewer
    return {inside / width, before * section + inside % width};
}
// The number behind which a place stands.
__device__ __forceinline__ int number_in_sections(Place place, int tiles, int section, int heads) {
    const int before = place.head / section, width = min(section, heads - before * section);
    return before * tiles * section + place.tile * width + place.head - before * section;
}

}  // namespace fa
