#include "launch/json_fields.h"

#include <cmath>
#include <new>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvgrid/error.h>

namespace kvgrid::launch {

namespace {

using nlohmann::json;

// "a string", for messages.
std::string_view kindOf(const json& value) {
    switch (value.type()) {
    case json::value_t::null:
        return "null";
    case json::value_t::object:
        return "an object";
    case json::value_t::array:
        return "a list";
    case json::value_t::string:
        return "a string";
    case json::value_t::boolean:
        return "true or false";
    case json::value_t::number_integer:
    case json::value_t::number_unsigned:
    case json::value_t::number_float:
        return "a number";
    default:
        return "binary";
    }
}

// Null and whatever is behind a key that is no object: absent.
const json* member(const json& object, std::string_view path) {
    const json* at = &object;
    while (true) {
        const std::size_t dot = path.find('.');
        if (!at->is_object()) return nullptr;
        const auto found = at->find(path.substr(0, dot));
        if (found == at->end() || found->is_null()) return nullptr;
        at = &*found;
        if (dot == std::string_view::npos) return at;
        path.remove_prefix(dot + 1);
    }
}

std::string alternatives(const Keys& keys) {
    std::string text(*keys.begin());
    if (keys.begin() + 1 == keys.end()) return text;
    return text + fmt::format(" (or {})", fmt::join(keys.begin() + 1, keys.end(), ", "));
}

}  // namespace

JsonFields::JsonFields(const json& object, std::string where)
    : object_(&object),
      where_(std::move(where)) {
    if (!object.is_object()) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("{}is {}, not an object", where_, kindOf(object)));
    }
}

JsonFields::Found JsonFields::find(const Keys& keys) const {
    for (const std::string_view key : keys) {
        if (const json* value = member(*object_, key)) return {.key = key, .value = value};
    }
    return {};
}

bool JsonFields::isNull(std::string_view key) const {
    const auto found = object_->find(key);
    return found != object_->end() && found->is_null();
}

std::int64_t wholeNumber(const JsonFields& fields, std::string_view key, const json& value,
                         std::int64_t least, std::int64_t most) {
    if (!value.is_number()) {
        fields.fail(key, fmt::format("is {}, not a whole number", kindOf(value)));
    }
    constexpr double beyond = 9.2e18;
    const bool huge =
        value.is_number_float()
            ? std::abs(value.get<double>()) > beyond
            : value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX};
    if (huge) fields.fail(key, fmt::format("{} is beyond 64 bits", value.dump()));
    if (value.is_number_float()) {
        fields.fail(key, fmt::format("{} is not a whole number", value.dump()));
    }
    const auto number = value.get<std::int64_t>();
    if (number < least || number > most) {
        fields.fail(key, most == INT64_MAX
                             ? fmt::format("{} is too small: at least {}", number, least)
                             : fmt::format("{} is out of range: {} to {}", number, least, most));
    }
    return number;
}

std::optional<std::int64_t> JsonFields::integer(const Keys& keys, std::int64_t least,
                                                std::int64_t most) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    return wholeNumber(*this, found.key, *found.value, least, most);
}

std::int64_t JsonFields::requiredInteger(const Keys& keys, std::int64_t least,
                                         std::int64_t most) const {
    const auto value = integer(keys, least, most);
    if (!value) {
        throw Error(ErrorCode::invalid_argument, where_ + "no " + alternatives(keys));
    }
    return *value;
}

std::optional<double> JsonFields::number(const Keys& keys) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    if (!found.value->is_number()) {
        fail(found.key, fmt::format("is {}, not a number", kindOf(*found.value)));
    }
    return found.value->get<double>();
}

std::optional<double> JsonFields::positive(const Keys& keys) const {
    const auto value = number(keys);
    if (value && *value <= 0) fail(find(keys).key, fmt::format("{} is not above 0", *value));
    return value;
}

std::optional<bool> JsonFields::boolean(const Keys& keys) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    if (!found.value->is_boolean()) {
        fail(found.key, fmt::format("is {}, not true or false", kindOf(*found.value)));
    }
    return found.value->get<bool>();
}

std::optional<std::string> JsonFields::text(const Keys& keys) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    if (!found.value->is_string()) {
        fail(found.key, fmt::format("is {}, not a string", kindOf(*found.value)));
    }
    return found.value->get<std::string>();
}

std::optional<std::vector<std::string>> JsonFields::texts(const Keys& keys) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    if (!found.value->is_array()) {
        fail(found.key, fmt::format("is {}, not a list", kindOf(*found.value)));
    }
    std::vector<std::string> texts;
    for (const json& item : *found.value) {
        if (!item.is_string()) {
            fail(fmt::format("{}[{}]", found.key, texts.size()),
                 fmt::format("is {}, not a string", kindOf(item)));
        }
        texts.push_back(item.get<std::string>());
    }
    return texts;
}

std::optional<JsonFields> JsonFields::object(const Keys& keys) const {
    const Found found = find(keys);
    if (!found) return std::nullopt;
    return JsonFields(*found.value, where_ + std::string(found.key) + ": ");
}

void JsonFields::fail(std::string_view key, const std::string& why) const {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}{}: {}", where_, key, why));
}

json parseJson(std::string_view text, const std::string& where) {
    std::vector<std::set<std::string>> keys;  // of the objects that are open
    const auto check = [&](int, json::parse_event_t event, const json& parsed) {
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                throw Error(ErrorCode::invalid_argument, where + key + " is there twice");
        }
        return true;
    };
    try {
        return json::parse(text, check);
    } catch (const std::bad_alloc&) {
        throw Error(ErrorCode::does_not_fit, where + "does not fit into memory");
    } catch (const json::exception& error) {
        // "[json.exception.parse_error.101] parse error at line 1, ..."
        const std::string_view what = error.what();
        const std::size_t end = what.find("] ");
        throw Error(ErrorCode::invalid_argument,
                    where + "is no JSON: " +
                        std::string(end == std::string_view::npos ? what : what.substr(end + 2)));
    }
}

}  // namespace kvgrid::launch
