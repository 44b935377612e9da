// Typed reading of a JSON object that someone else wrote. A member that is null counts as absent.
// What is there but wrong throws Error (invalid_argument) as "file: key: what is wrong".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvgrid::launch {

// Names of the same thing in files of different families, six at most; the first that is there
// counts. A dot leads into an inner object: "rope_parameters.rope_theta".
class Keys {
public:
    constexpr Keys(std::initializer_list<std::string_view> keys) {
        for (const std::string_view key : keys)
            keys_.at(count_++) = key;
    }
    [[nodiscard]] constexpr const std::string_view* begin() const noexcept { return keys_.data(); }
    [[nodiscard]] constexpr const std::string_view* end() const noexcept {
        return keys_.data() + count_;
    }

private:
    std::array<std::string_view, 6> keys_{};
    std::size_t count_ = 0;
};

class JsonFields {
public:
    // `object` must outlive this; `where` stands in front of keys in messages ("config.json: ").
    // Throws Error when it is no object.
    JsonFields(const nlohmann::json& object, std::string where);

    struct Found {
        std::string_view key;
        const nlohmann::json* value = nullptr;
        explicit operator bool() const noexcept { return value != nullptr; }
    };
    [[nodiscard]] Found find(const Keys& keys) const;
    [[nodiscard]] bool has(std::string_view key) const { return static_cast<bool>(find({key})); }
    // Written as null, which some families tell apart from not written.
    [[nodiscard]] bool isNull(std::string_view key) const;

    [[nodiscard]] std::optional<std::int64_t> integer(
        const Keys& keys, std::int64_t least,
        std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;
    // Finite. A whole number will do.
    [[nodiscard]] std::optional<double> number(const Keys& keys) const;
    [[nodiscard]] std::optional<double> positive(const Keys& keys) const;
    [[nodiscard]] std::optional<bool> boolean(const Keys& keys) const;
    [[nodiscard]] std::optional<std::string> text(const Keys& keys) const;
    [[nodiscard]] std::optional<std::vector<std::string>> texts(const Keys& keys) const;
    [[nodiscard]] std::optional<JsonFields> object(const Keys& keys) const;
    // The member must be there: throws naming all its names.
    [[nodiscard]] std::int64_t requiredInteger(
        const Keys& keys, std::int64_t least,
        std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;

    [[nodiscard]] const std::string& where() const noexcept { return where_; }
    [[noreturn]] void fail(std::string_view key, const std::string& why) const;

private:
    const nlohmann::json* object_;
    std::string where_;
};

// A whole number in [least, most]; throws as `fields.fail(key, ...)` does.
[[nodiscard]] std::int64_t wholeNumber(const JsonFields& fields, std::string_view key,
                                       const nlohmann::json& value, std::int64_t least,
                                       std::int64_t most);

// Parses text; `where` names it in the Error (invalid_argument) of text that is no JSON.
[[nodiscard]] nlohmann::json parseJson(std::string_view text, const std::string& where);

}  // namespace kvgrid::launch
