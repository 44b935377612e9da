// A GoogleTest main for suites in which every rank runs the same tests.
//
// Rank 0 prints and writes the report. Another rank prints only its failures, as they happen, with
// its rank. After each test the ranks agree: a test that failed anywhere failed everywhere, and all
// ranks exit alike. A test that leaves the others waiting in a collective ends by CTest's timeout.

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace {

bool agreeing = false;  // while a rank takes over a failure of another, which has printed it

class PrintFailures : public testing::EmptyTestEventListener {
public:
    explicit PrintFailures(int rank) : rank_(rank) {}

    void OnTestPartResult(const testing::TestPartResult& result) override {
        if (!result.failed() || agreeing) return;
        std::fprintf(stderr, "[rank %d] %s:%d: Failure\n%s\n", rank_,
                     result.file_name() != nullptr ? result.file_name() : "unknown file",
                     result.line_number(), result.message());
    }

private:
    int rank_;
};

class AgreeOnFailures : public testing::EmptyTestEventListener {
public:
    // comm is used for nothing else, and lives as long as the listener.
    explicit AgreeOnFailures(MPI_Comm comm) : comm_(comm) {}

    void OnTestEnd(const testing::TestInfo& test) override {
        agree(test.result()->Failed(), std::string(test.test_suite_name()) + "." + test.name());
    }

    void OnTestSuiteEnd(const testing::TestSuite& suite) override {
        agree(suite.ad_hoc_test_result().Failed(), suite.name());
    }

private:
    void agree(bool failed, const std::string& what) const {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (finalized != 0) return;
        int rank = 0;
        int ranks = 0;
        MPI_Comm_rank(comm_, &rank);
        MPI_Comm_size(comm_, &ranks);
        const int mine = failed ? 1 : 0;
        std::vector<int> all(static_cast<std::size_t>(ranks));
        MPI_Allgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, comm_);
        if (failed) return;
        std::string where;
        for (int other = 0; other < ranks; ++other) {
            if (all[static_cast<std::size_t>(other)] != 0) where += " " + std::to_string(other);
        }
        if (where.empty()) return;
        agreeing = true;
        ADD_FAILURE() << what << " failed on rank" << where;
        agreeing = false;
    }

    MPI_Comm comm_;
};

// RapidCheck draws its seed from the clock: ranks would generate different cases. Set RC_PARAMS to
// repeat a run.
void shareRapidCheckSeed(int rank) {
    if (std::getenv("RC_PARAMS") != nullptr) return;
    unsigned seed = std::random_device{}();
    MPI_Bcast(&seed, 1, MPI_UNSIGNED, 0, MPI_COMM_WORLD);
    const std::string parameters = "seed=" + std::to_string(seed);
    setenv("RC_PARAMS", parameters.c_str(), 1);
    if (rank == 0) std::printf("RC_PARAMS=\"%s\"\n", parameters.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    shareRapidCheckSeed(rank);
    testing::InitGoogleTest(&argc, argv);

    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    if (rank != 0) {
        delete listeners.Release(listeners.default_result_printer());
        delete listeners.Release(listeners.default_xml_generator());
        listeners.Append(new PrintFailures(rank));
    }
    listeners.Append(new AgreeOnFailures(comm));

    int status = RUN_ALL_TESTS();

    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) {
        int worst = status;
        MPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MAX, comm);
        status = worst;
        MPI_Comm_free(&comm);
        MPI_Finalize();
    }
    return status;
}
