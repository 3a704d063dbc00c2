// Switching from one fiber to another: the registers a call must keep go on the stack, and the stack is exchanged. Part of engine.cpp.
#pragma once

#include <stddef.h>

namespace fa_host {

// void fa_host_switch(void** save_stack_pointer, void* load_stack_pointer): callee-saved registers go on the stack.
extern "C" void fa_host_switch(void**, void*);
#if defined(__x86_64__)
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
)");
constexpr int saved_words = 6;  // then the return address
#elif defined(__aarch64__)
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
)");
#else
#error "the host backend has a fiber switch for x86-64 and aarch64 only"
#endif

// AddressSanitizer must be told of stack switches; these exist only in a process that has it.
extern "C" {
void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size) __attribute__((weak));
void __asan_poison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
void __asan_unpoison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
}

}  // namespace fa_host
