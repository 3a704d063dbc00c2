// The fiber switch: the callee-saved registers go on the stack, then the stack pointer is exchanged.
//
// The functions of the engine in which threads wait are written here in assembly: they call a function of the engine that
// selects the next fiber, switch to it, and end in a jump instead of a return. A `ret` would be predicted to return to this fiber's
// caller, but the resumed fiber continues elsewhere: in unrolled code, one call further. The misprediction costs 15 ns a switch, as
// much as everything else in it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "engine.hpp"

namespace fa_host {

// void fa_host_switch(void** save_stack_pointer, void* load_stack_pointer)
extern "C" void fa_host_switch(void**, void*);

// Where the stack pointer of the running fiber is saved, and the stack pointer to load. Null, null: no switch.
struct Next {
    void** save;
    void* load;
};
#pragma GCC visibility push(hidden)
extern "C" {
Next fa_host_warp_arrive(unsigned mask, Apply, void*, const char*, const char*, int);
Next fa_host_block_arrive(const char*, int);
Next fa_host_named_arrive(int, int, const char*, int);
Next fa_host_mbarrier_arrive_wait(unsigned long long*, unsigned, const char*, int);
Next fa_host_wgmma_arrive(const Product*, const char*, const char*, int);
Next fa_host_yield_arrive();
Next fa_host_wgmma_late_arrive(int);
Next fa_host_cluster_wait_arrive(const char*, int);
Next fa_host_dependency_arrive(const char*, int);
}
#pragma GCC visibility pop

#if defined(__x86_64__)
static inline char* stack_pointer() {
    char* top;
    asm volatile("mov %%rsp, %0" : "=r"(top));
    return top;
}

asm(R"(
.text
.globl fa_host_switch
.hidden fa_host_switch
.type fa_host_switch, @function
fa_host_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size fa_host_switch, .-fa_host_switch

.macro fa_host_waiting name, arrive
.globl \name
.type \name, @function
\name:
    sub $8, %rsp
    call \arrive
    add $8, %rsp
    test %rax, %rax
    jz 1f
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rax)
    mov %rdx, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    pop %rcx
    jmp *%rcx
1:  ret
.size \name, .-\name
.endm
fa_host_waiting fa_host_warp, fa_host_warp_arrive
fa_host_waiting fa_host_syncthreads, fa_host_block_arrive
fa_host_waiting fa_host_bar_sync, fa_host_named_arrive
fa_host_waiting fa_host_mbarrier_wait, fa_host_mbarrier_arrive_wait
fa_host_waiting fa_host_wgmma, fa_host_wgmma_arrive
fa_host_waiting fa_host_yield, fa_host_yield_arrive
fa_host_waiting fa_host_wgmma_late, fa_host_wgmma_late_arrive
fa_host_waiting fa_host_cluster_wait, fa_host_cluster_wait_arrive
fa_host_waiting fa_host_dependency_wait, fa_host_dependency_arrive
)");
constexpr int saved_registers = 6;  // above them on the stack: the return address
#elif defined(__aarch64__)
static inline char* stack_pointer() {
    char* top;
    asm volatile("mov %0, sp" : "=r"(top));
    return top;
}

asm(R"(
.text
.globl fa_host_switch
.hidden fa_host_switch
.type fa_host_switch, %function
fa_host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size fa_host_switch, .-fa_host_switch

.macro fa_host_waiting name, arrive
.globl \name
.type \name, %function
\name:
    stp x29, x30, [sp, #-16]!
    bl \arrive
    ldp x29, x30, [sp], #16
    cbz x0, 1f
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    br x30
1:  ret
.size \name, .-\name
.endm
fa_host_waiting fa_host_warp, fa_host_warp_arrive
fa_host_waiting fa_host_syncthreads, fa_host_block_arrive
fa_host_waiting fa_host_bar_sync, fa_host_named_arrive
fa_host_waiting fa_host_mbarrier_wait, fa_host_mbarrier_arrive_wait
fa_host_waiting fa_host_wgmma, fa_host_wgmma_arrive
fa_host_waiting fa_host_yield, fa_host_yield_arrive
fa_host_waiting fa_host_wgmma_late, fa_host_wgmma_late_arrive
fa_host_waiting fa_host_cluster_wait, fa_host_cluster_wait_arrive
fa_host_waiting fa_host_dependency_wait, fa_host_dependency_arrive
)");
#else
#error "the CPU engine has a fiber switch for x86-64 and aarch64 only"
#endif

// AddressSanitizer must be told of stack switches. These symbols are null in a process without it.
extern "C" {
void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size) __attribute__((weak));
void __asan_poison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
void __asan_unpoison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
}

}  // namespace fa_host
