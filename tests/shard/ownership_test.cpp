#include "shard/ownership.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace kvgrid {
namespace {

constexpr std::int64_t stripe = 256;
constexpr std::int64_t lanes = 64;
const std::vector<int> context_counts{1, 2, 4, 8, 16, 32, 64};
const std::vector<std::int32_t> slots{0, 1, 2, 3, 31, 63, 64, 65, 1000, 4095, (1 << 30) - 1};

// The definition: lane l of slot s lies on rank (l + s) mod contexts.
int contextByDefinition(std::int64_t position, std::int32_t slot, int contexts) {
    const std::int64_t lane = position / stripe % lanes;
    return static_cast<int>((lane + slot) % contexts);
}

// Positions around every stripe and lane boundary, and far ones.
std::vector<std::int64_t> boundaryPositions() {
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i <= 2 * lanes + 1; ++i) {
        for (const std::int64_t delta : {-1, 0, 1, 128}) {
            if (i * stripe + delta >= 0) positions.push_back(i * stripe + delta);
        }
    }
    for (const std::int64_t far : {std::int64_t{1} << 20, std::int64_t{1} << 31,
                                   std::int64_t{1} << 32, std::int64_t{1} << 40}) {
        for (const std::int64_t delta : {-257, -256, -255, -1, 0, 1, 255, 256, 257}) {
            positions.push_back(far + delta);
        }
    }
    return positions;
}

TEST(Ownership, PlacesRanksRowByRow) {
    for (int rank = 0; rank < 8; ++rank) {
        const GridPlace place = placeOf(rank, 2, 4);
        EXPECT_EQ(place.head * place.contexts + place.context, rank);
        EXPECT_GE(place.head, 0);
        EXPECT_LT(place.head, place.heads);
        EXPECT_LT(place.context, place.contexts);
        EXPECT_EQ(place.heads, 2);
        EXPECT_EQ(place.contexts, 4);
    }
}

TEST(Ownership, SplitsTheHeadsWithoutGapOrOverlap) {
    for (const int heads : {1, 2, 4, 8}) {
        int next = 0;
        for (int head = 0; head < heads; ++head) {
            const HeadRange range = ownedHeads(32, {.head = head, .heads = heads});
            EXPECT_EQ(range.first, next);
            EXPECT_EQ(range.count, 32 / heads);
            next += range.count;
        }
        EXPECT_EQ(next, 32);
    }
}

TEST(Ownership, FollowsTheDefinitionOfLanes) {
    for (const int contexts : context_counts) {
        for (const std::int32_t slot : slots) {
            for (const std::int64_t position : boundaryPositions()) {
                ASSERT_EQ(contextOf(GlobalPosition{position}, slot, contexts),
                          contextByDefinition(position, slot, contexts))
                    << position << " of slot " << slot << " over " << contexts;
            }
        }
    }
}

TEST(Ownership, GlobalToLocalAndBackAtEveryBoundary) {
    for (const int contexts : context_counts) {
        for (const std::int32_t slot : slots) {
            for (const std::int64_t position : boundaryPositions()) {
                const int context = contextOf(GlobalPosition{position}, slot, contexts);
                const LocalPosition local = toLocal(GlobalPosition{position}, contexts);
                ASSERT_EQ(toGlobal(local, slot, context, contexts), GlobalPosition{position})
                    << position << " of slot " << slot << " over " << contexts;
            }
        }
    }
}

// Walks a sequence token by token: each owner sees its local positions in order, without a gap, and
// owns at each length as many as were counted.
TEST(Ownership, OwnedTokensAgreeWithCounting) {
    for (const int contexts : context_counts) {
        for (const std::int32_t slot : {0, 1, 5, 63, 64, 1000}) {
            std::vector<std::int64_t> counted(static_cast<std::size_t>(contexts), 0);
            const std::int64_t end = 2 * lanes * stripe + 3 * stripe + 7;
            for (std::int64_t position = 0; position < end; ++position) {
                const int owner = contextByDefinition(position, slot, contexts);
                auto& count = counted[static_cast<std::size_t>(owner)];
                ASSERT_EQ(toLocal(GlobalPosition{position}, contexts), LocalPosition{count});
                ASSERT_EQ(toGlobal(LocalPosition{count}, slot, owner, contexts),
                          GlobalPosition{position});
                ++count;
                const std::int64_t within = position % stripe;
                if (within > 1 && within < stripe - 2) continue;
                std::int64_t most = 0;
                for (int context = 0; context < contexts; ++context) {
                    const std::int64_t owned = counted[static_cast<std::size_t>(context)];
                    ASSERT_EQ(ownedTokens(position + 1, slot, context, contexts), owned)
                        << position + 1 << " tokens of slot " << slot << " on " << context << " of "
                        << contexts;
                    most = std::max(most, owned);
                }
                ASSERT_EQ(mostOwnedTokens(position + 1, contexts), most);
            }
        }
    }
}

TEST(Ownership, AnEmptySequenceIsOwnedByNobody) {
    for (const int contexts : context_counts) {
        EXPECT_EQ(mostOwnedTokens(0, contexts), 0);
        for (int context = 0; context < contexts; ++context) {
            EXPECT_EQ(ownedTokens(0, 3, context, contexts), 0);
        }
    }
}

// Counted for every first token, in a sequence of 600.
TEST(Ownership, TheMostBlocksOfAWindow) {
    for (const std::int64_t block_size : {1, 2, 16, 64}) {
        for (const std::int64_t window : {1, 2, 16, 17, 63, 64, 65, 200}) {
            for (const std::int64_t rows : {1, 2, 33}) {
                std::int64_t most = 0;
                for (std::int64_t first = 0; first + window - 1 + rows <= 600; ++first) {
                    const std::int64_t last = first + window - 1 + rows - 1;
                    most = std::max(most, last / block_size - first / block_size + 1);
                }
                EXPECT_EQ(mostBlocksOfWindow(window, rows, block_size, 1), most)
                    << window << " " << rows << " " << block_size;
            }
        }
    }
}

// Of several context ranks, no first token and slot needs more.
TEST(Ownership, NoContextRankHoldsMoreBlocksOfAWindow) {
    for (const int contexts : {2, 4, 64}) {
        for (const std::int64_t window : {1, 200, 256, 700, 5000}) {
            const std::int64_t most = mostBlocksOfWindow(window, 3, 64, contexts);
            for (std::int64_t first = 0; first < std::int64_t{256} * contexts * 2; first += 17) {
                const std::int64_t end = first + window - 1 + 3;
                const std::int64_t blocks = (ownedTokens(end, 1, 0, contexts) + 63) / 64 -
                                            ownedTokens(first, 1, 0, contexts) / 64;
                EXPECT_LE(blocks, most) << window << " from " << first << " of " << contexts;
            }
        }
    }
}

RC_GTEST_PROP(Ownership, SharesSumToTheLength, ())
{
    const int contexts = 1 << *rc::gen::inRange(0, 7);
    const auto slot = *rc::gen::inRange<std::int32_t>(0, 1 << 30);
    const auto length = *rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 42);
    std::int64_t sum = 0;
    std::int64_t most = 0;
    for (int context = 0; context < contexts; ++context) {
        const std::int64_t owned = ownedTokens(length, slot, context, contexts);
        RC_ASSERT(owned >= 0);
        // The first position that is not owned yet is the first one past the share.
        const auto next =
            static_cast<std::int64_t>(toGlobal(LocalPosition{owned}, slot, context, contexts));
        RC_ASSERT(next >= length);
        if (owned > 0) {
            RC_ASSERT(static_cast<std::int64_t>(
                          toGlobal(LocalPosition{owned - 1}, slot, context, contexts)) < length);
        }
        sum += owned;
        most = std::max(most, owned);
    }
    RC_ASSERT(sum == length);
    RC_ASSERT(mostOwnedTokens(length, contexts) == most);
}

}  // namespace
}  // namespace kvgrid
