// The wavefronts of shared memory: the cycles that its banks take for the accesses of warps, and how many they would take without conflicts.
//
// Shared memory has 32 banks of 4 bytes. A warp's access is served 128 bytes at a time: all lanes where each has up to 4 bytes, half of them
// of 8, a quarter of 16; of ldmatrix a matrix of 8 rows. Of such a part a bank gives one word in a wavefront, to all lanes that want it: a
// part takes as many wavefronts as the most different words of one bank.
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
        unsigned at[32];
    };
    struct Site {  // a place in the code, for one warp since it has last come together
        void* code;
        unsigned used, room;
        unsigned count[32];  // of each lane
        Access* access;      // kept from one time to the next
    };
    static constexpr int max_sites = 2048;        // of a warp
    static constexpr unsigned max_pending = 1 << 16;  // of a site: 9 MB

    Worker* worker;
    uint64_t lost;  // accesses that there was no room for
    Wavefronts total[max_wavefronts];
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
        lost = 0;
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
        return worker->static_shared && at >= 0 && at < worker->launch->static_bytes ? at - worker->launch->static_guard : -1;
    }

    void access(unsigned thread, const char* address, size_t bytes, void* code) {
        const long long at = offset(address);
        if (at < 0) return;
        Site* found = site_of(thread / 32, code);
        const unsigned lane = thread % 32;
        if (!found || found->count[lane] == max_pending) {
            ++lost;
            return;
        }
        const unsigned n = found->count[lane]++;
        if (n >= found->used) {
            if (n == found->room) {
                const unsigned room = found->room ? 2 * found->room : 4;
                auto* more = static_cast<Access*>(realloc(found->access, room * sizeof(Access)));
                if (!more) {
                    ++lost;
                    return;
                }
                found->access = more, found->room = room;
            }
            found->access[n].mask = 0, found->access[n].bytes = 0;
            found->used = n + 1;
        }
        Access& a = found->access[n];
        a.mask |= 1u << lane;
        a.at[lane] = unsigned(at);
        if (bytes > a.bytes) a.bytes = unsigned(bytes);
    }

    // The warp's lanes have come together.
    void together(int warp) {
        for (int i = 0; i < sites[warp]; ++i) {
            Site& s = site[warp][used[warp][i]];
            for (unsigned n = 0; n < s.used; ++n) count(s.access[n], s.code);
            s.used = 0;
            memset(s.count, 0, sizeof s.count);
        }
    }
    void all_together() {
        for (int i = 0; i < worker->warps; ++i) together(i);
    }

    // Whether lane i and lane i ^ step have one address.
    static bool shared_by_pairs(const Access& a, unsigned first, unsigned lanes, unsigned step) {
        for (unsigned lane = first; lane < first + lanes; ++lane)
            if (a.mask >> lane & a.mask >> (lane ^ step) & 1 && a.at[lane] != a.at[lane ^ step]) return false;
        return true;
    }

    static void serve(Wavefronts& to, const Access& a, unsigned first, unsigned lanes) {
        const unsigned words = (a.bytes + 3) / 4;
        unsigned different[32] = {}, word_of[32][64], all = 0, most = 0;
        for (unsigned lane = first; lane < first + lanes; ++lane)
            for (unsigned w = 0; w < words && a.mask >> lane & 1; ++w) {
                const unsigned word = a.at[lane] / 4 + w, bank = word % 32;
                unsigned k = 0;
                while (k < different[bank] && word_of[bank][k] != word) ++k;
                if (k == different[bank]) word_of[bank][different[bank]++] = word, ++all;
            }
        for (unsigned n : different) most = n > most ? n : most;
        to.wavefronts += most;
        to.ideal += (all + 31) / 32;
    }

    void count(const Access& a, void* code) {
        Wavefronts* to = total_of(code);
        if (!to) {
            ++lost;
            return;
        }
        // The lanes that are served together: 128 bytes of different addresses, twice as many lanes where neighbours, or every second
        // lane, have the same one.
        const unsigned least = a.bytes <= 4 ? 32 : a.bytes <= 8 ? 16 : 8;
        for (unsigned first = 0; first < 32;) {
            const unsigned both = 2 * least;
            const unsigned lanes = least < 32 && first % both == 0 && (shared_by_pairs(a, first, both, 1) || shared_by_pairs(a, first, both, 2)) ? both : least;
            serve(*to, a, first, lanes);
            first += lanes;
        }
        ++to->accesses;
    }

    // Adds what this worker has counted to the launch's.
    void add_to(Wavefronts* all, int* count, unsigned long long* lost_in_all) const {
        *lost_in_all += lost;
        for (const Wavefronts& mine : total) {
            if (!mine.code) continue;
            int i = 0;
            while (i < *count && all[i].code != mine.code) ++i;
            if (i == max_wavefronts) continue;
            if (i == *count) all[(*count)++] = {mine.code, 0, 0, 0};
            all[i].accesses += mine.accesses, all[i].wavefronts += mine.wavefronts, all[i].ideal += mine.ideal;
        }
    }

private:
    static unsigned hashed(const void* code, unsigned size) {
        return unsigned(reinterpret_cast<uintptr_t>(code) * 0x9e3779b97f4a7c15ull >> 40) % size;
    }
    Site* site_of(unsigned warp, void* code) {
        unsigned i = hashed(code, max_sites);
        for (int probes = 0; probes < max_sites; ++probes, i = (i + 1) % max_sites) {
            Site& s = site[warp][i];
            if (s.code == code) return &s;
            if (s.code) continue;
            s.code = code;
            used[warp][sites[warp]++] = static_cast<unsigned short>(i);
            return &s;
        }
        return nullptr;
    }
    Wavefronts* total_of(void* code) {
        unsigned i = hashed(code, max_wavefronts);
        for (int probes = 0; probes < max_wavefronts; ++probes, i = (i + 1) % max_wavefronts) {
            if (total[i].code == code) return &total[i];
            if (total[i].code) continue;
            total[i].code = code;
            return &total[i];
        }
        return nullptr;
    }
};

}  // namespace fa_host
