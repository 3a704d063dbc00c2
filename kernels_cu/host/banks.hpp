// The traffic of warps: the wavefronts of shared memory, which are the cycles that its banks take, and how many it would take without
// conflicts; the sectors of global memory, which are what a request moves, and how few would do if neighbouring lanes had neighbouring bytes.
//
// Shared memory has 32 banks of 4 bytes. A warp's access is served in parts: all lanes together where each has up to 4 bytes, 16 lanes of
// 8 bytes, 8 of 16 (of ldmatrix the rows of a matrix). Two such parts become one where each lane has the address of its neighbour, or of
// the lane after that. In a wavefront a bank gives one word of a part, to all lanes that want it: a part takes as many wavefronts as the most
// different words of one bank. These rules give an H200's counts, all digits of them (tests/device/test_banks.py).
//
// A request to global memory is the access of a warp to tensors and workspaces, of up to 16 bytes a lane. It touches aligned sectors of 32
// bytes (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"). Atomics are not counted.
//
// Lanes run one after another here. What a warp does together is put together again at its barriers and collectives: the n-th time that a
// lane has come to a place in the code belongs to the n-th time of the others.
// Limits: the compiler of the CPU decides what an access is. Neighbouring loads that nvcc merges count one by one. TMA and wgmma are not
// counted: they do not go through the load-store unit.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "block.hpp"

namespace fa_host {

struct Banks {
    struct Access {  // of a warp
        unsigned mask, bytes;  // bytes of a lane
        unsigned at[32];  // offsets in shared memory; low halves of addresses in global memory, which tell sectors of tensors apart
    };
    struct Site {  // a place in the code, for one warp since it has last come together
        void* code;
        Kind kind;
        unsigned used, room;
        unsigned count[32];  // of each lane
        Access* access;  // kept from one time to the next
    };
    static constexpr int max_sites = 2048;  // of a warp
    static constexpr unsigned max_accesses = 1 << 20;  // between two barriers of a block: 143 MB

    Worker* worker;
    uint64_t lost;  // accesses that there was no room for
    unsigned allocated;  // accesses
    Traffic total[max_places];
    Site site[max_warps][max_sites];
    unsigned short used[max_warps][max_sites];
    int sites[max_warps];

    // Null where there is no address space.
    static Banks* of(Worker& w) {
        if (!w.banks_memory) {
            w.banks_memory = reinterpret_cast<Banks*>(map_memory(sizeof(Banks)));
            if (w.banks_memory) w.banks_memory->worker = &w;
        }
        return w.banks_memory;
    }

    void new_launch() {
        lost = 0, allocated = 0;
        for (int warp = 0; warp < max_warps; ++warp) {
            for (int i = 0; i < sites[warp]; ++i) {
                Site& s = site[warp][used[warp][i]];
                ::free(s.access);
                s = Site{};
            }
            sites[warp] = 0;
        }
        memset(static_cast<void*>(total), 0, sizeof total);
    }

    // The offset in the block's shared memory; -1 of any other memory.
    long long offset(const char* address) const {
        long long at = address - worker->arena;
        if (at >= 0 && at < worker->launch->dynamic_bytes) return at;
        at = address - worker->static_shared;
        return worker->static_shared && at >= 0 && at < worker->launch->static_bytes ? at : -1;
    }

    // kind: what it is where the address is not one of shared memory; of_shared where that is not counted.
    void access(unsigned thread, const char* address, size_t bytes, void* code, Kind kind) {
        unsigned long long at = (unsigned long long)(offset(address));
        if ((long long)(at) >= 0) kind = of_shared;
        else if (kind != of_shared && global_memory(address)) at = reinterpret_cast<uintptr_t>(address);
        else return;
        for (size_t done = 0; done < bytes; done += 16)  // a GPU has no wider ones
            if (!keep(thread, unsigned(at + done), unsigned(bytes - done < 16 ? bytes - done : 16), code, kind)) ++lost;
    }
    bool global_memory(const char* address) const {
        const Launch& launch = *worker->launch;
        for (int i = 0; i < launch.spans; ++i)
            if (size_t(address - launch.span[i].start) < launch.span[i].bytes) return true;
        return false;
    }

    // The warp's lanes have come together.
    void together(int warp) {
        for (int i = 0; i < sites[warp]; ++i) {
            Site& s = site[warp][used[warp][i]];
            for (unsigned n = 0; n < s.used; ++n) count(s.access[n], s.code, s.kind);
            s.used = 0;
            memset(s.count, 0, sizeof s.count);
        }
    }
    void all_together() {
        for (int i = 0; i < worker->warps; ++i) together(i);
    }

    void count(const Access& a, void* code, Kind kind) {
        Traffic* to = total_of(code, kind);
        if (!to) {
            ++lost;
            return;
        }
        ++to->accesses;
        if (kind != of_shared) {
            touch(*to, a);
            return;
        }
        const unsigned part = a.bytes <= 4 ? 32 : a.bytes <= 8 ? 16 : 8;
        for (unsigned first = 0; first < 32;) {
            const bool two = first % (2 * part) == 0 && part < 32 && (pairs(a, first, 2 * part, 1) || pairs(a, first, 2 * part, 2));
            serve(*to, a, first, two ? 2 * part : part);
            first += two ? 2 * part : part;
        }
    }

    // Adds what this worker has counted to the launch's.
    void add_to(Traffic* all, int* count, unsigned long long* lost_in_all) const {
        *lost_in_all += lost;
        for (const Traffic& mine : total) {
            if (!mine.code) continue;
            int i = 0;
            while (i < *count && (all[i].code != mine.code || all[i].kind != mine.kind)) ++i;
            if (i == max_places) continue;
            if (i == *count) all[(*count)++] = {mine.code, mine.kind, 0, 0, 0};
            all[i].accesses += mine.accesses, all[i].parts += mine.parts, all[i].ideal += mine.ideal;
        }
    }

  private:
    // Whether each lane of a part has the address of the lane `step` from it.
    static bool pairs(const Access& a, unsigned first, unsigned lanes, unsigned step) {
        for (unsigned lane = first; lane < first + lanes; ++lane)
            if (a.mask >> lane & a.mask >> (lane ^ step) & 1 && a.at[lane] != a.at[lane ^ step]) return false;
        return true;
    }

    // The sectors of a request; the fewest have its different bytes next to each other.
    static void touch(Traffic& to, const Access& a) {
        unsigned sector[64], bytes[64], sectors = 0, all = 0;  // bytes: a bit each. A lane of 16 bytes may be in two sectors.
        for (unsigned lane = 0; lane < 32; ++lane)
            for (unsigned b = 0; b < a.bytes && a.mask >> lane & 1; ++b) {
                const unsigned at = a.at[lane] + b;
                unsigned i = sectors && sector[sectors - 1] == at / 32 ? sectors - 1 : 0;
                while (i < sectors && sector[i] != at / 32) ++i;
                if (i == sectors) sector[sectors] = at / 32, bytes[sectors++] = 0;
                all += !(bytes[i] >> at % 32 & 1);
                bytes[i] |= 1u << at % 32;
            }
        to.parts += sectors;
        to.ideal += (all + 31) / 32;
    }

    static void serve(Traffic& to, const Access& a, unsigned first, unsigned lanes) {
        const unsigned words = (a.bytes + 3) / 4;
        unsigned different[32] = {}, word_of[32][64], all = 0, most = 0;  // at most 16 lanes of 4 words, or 32 of one
        for (unsigned lane = first; lane < first + lanes; ++lane)
            for (unsigned w = 0; w < words && a.mask >> lane & 1; ++w) {
                const unsigned word = a.at[lane] / 4 + w, bank = word % 32;
                unsigned k = 0;
                while (k < different[bank] && word_of[bank][k] != word) ++k;
                if (k == different[bank]) word_of[bank][different[bank]++] = word, ++all;
            }
        for (unsigned n : different) most = n > most ? n : most;
        to.parts += most;
        to.ideal += (all + 31) / 32;
    }

    bool keep(unsigned thread, unsigned at, unsigned bytes, void* code, Kind kind) {
        Site* s = site_of(thread / 32, code, kind);
        if (!s) return false;
        const unsigned lane = thread % 32, n = s->count[lane];
        if (n == s->room) {
            const unsigned more = s->room ? s->room : 4;
            if (allocated + more > max_accesses) return false;
            auto* access = static_cast<Access*>(realloc(s->access, (s->room + more) * sizeof(Access)));
            if (!access) return false;
            s->access = access, s->room += more, allocated += more;
        }
        ++s->count[lane];
        Access& a = s->access[n];
        if (n == s->used) a.mask = 0, a.bytes = 0, ++s->used;
        a.mask |= 1u << lane;
        a.at[lane] = at;
        if (bytes > a.bytes) a.bytes = bytes;
        return true;
    }

    static unsigned hashed(const void* code, Kind kind, unsigned size) {
        return (unsigned(reinterpret_cast<uintptr_t>(code) * 0x9e3779b97f4a7c15ull >> 40) + kind) % size;
    }
    Site* site_of(unsigned warp, void* code, Kind kind) {
        unsigned i = hashed(code, kind, max_sites);
        for (int probes = 0; probes < max_sites; ++probes, i = (i + 1) % max_sites) {
            Site& s = site[warp][i];
            if (s.code == code && s.kind == kind) return &s;
            if (s.code) continue;
            s.code = code, s.kind = kind;
            used[warp][sites[warp]++] = static_cast<unsigned short>(i);
            return &s;
        }
        return nullptr;
    }
    Traffic* total_of(void* code, Kind kind) {
        unsigned i = hashed(code, kind, max_places);
        for (int probes = 0; probes < max_places; ++probes, i = (i + 1) % max_places) {
            if (total[i].code == code && total[i].kind == kind) return &total[i];
            if (total[i].code) continue;
            total[i].code = code, total[i].kind = kind;
            return &total[i];
        }
        return nullptr;
    }
};

}  // namespace fa_host
