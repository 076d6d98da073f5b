// The directed cases of host_conformance, as directed_case.h reads them. It draws others itself.
#ifndef MLA_TESTS_CONFORMANCE_CASES_HOST_CASES_H_
#define MLA_TESTS_CONFORMANCE_CASES_HOST_CASES_H_

namespace mla::conformance {

// Cases around loop boundaries: rings of stages that are filled several times, items one after
// another in one unit, contexts that end in the middle of a tile, pages whose size divides no tile,
// and more parts of a row than the waves of a block merge at a time.
// kManyParts takes a minute of the whole run when its 64 heads are repeated in each format, so the
// second repetition has 16 heads.
inline constexpr char kManyParts[] = "absorbed:64:1,16000,64:256";
inline constexpr char kManyPartsAgain[] = "absorbed:16:1,16000,64:256";
inline constexpr const char* kDirected[] = {
    "absorbed:16:1,700,3:1",
    "absorbed:128:1,300,64/1,33,64/1,64,64:1",
    "absorbed:64:2,257,16:7",
    "absorbed:1:5,129,7/1,0,7/64,3,7:2",
    "project:5:3,200,16/9,31,16:2",
    "absorbed:40:3,515,1,full/2,96,1:1",
    "expanded:2:130,300,16:2",
    "expanded:1:257,0,3/3,500,3:1",
    "expanded:3:64,129,64,full:4",
    "absorbed:16:17,31,128/1,1500,128:2",
    kManyParts,
    "absorbed:8:6,200,16/2,65,16:2",
    "absorbed:20:3,140,64/7,31,64:3",
};
// The same for the expanded form with wider heads; backends without wider heads get the cases that
// they support.
inline constexpr const char* kDirectedWide[] = {
    "expanded:2:130,300,16:2",     "expanded:1:257,0,3/3,500,3:1", "expanded:3:64,129,64,full:4",
    "expanded:2:1,90,7/70,60,7:1", "expanded:1:300,0,64/65,0,1:3", "project:3:3,200,16/9,31,16:2",
};
// With index lists.
inline constexpr const char* kDirectedLists[] = {
    "v32:128:2,1200,64/1,33,64:1", "v32:16:1,900,1/3,0,4/6,700,3:2", "v32:64:7,400,16:7",
    "v32:8:1,5000,64/2,40,64:9",   "v32:20:3,333,1/1,0,64:1",        "v32:129:1,600,128/1,1,3:2",
};

// With lists that name each position twice (ListKind::kTwice): contexts that end at a tile's
// border, before and after it, on pages that divide no tile; rows of which some see few positions.
inline constexpr const char* kDirectedTwice[] = {
    "v32:128:1,63,64:1", "v32:64:1,31,3/1,64,5:2",    "v32:16:2,127,7/1,0,1:2",
    "v32:72:3,30,6:1",   "v32:128:1,255,16/1,1,64:3",
};

// Over rows of kFp8Row whose scales no server writes, with both products. Where a request has
// several query rows, its last KV row has a scale that makes it NaN, in the middle of a tile or at
// its end.
inline constexpr const char* kDirectedScales[] = {
    "absorbed:128:1,700,64:2",
    "absorbed:64:1,300,16/2,70,7:2",
    "absorbed:20:5,200,64:3",
    "absorbed:16:1,129,3/1,0,7:1",
    "absorbed:128:3,61,64/7,25,5:2",
    "absorbed:9:4,60,3:1",
    "absorbed:64:2,94,16:3",
    "v32:20:3,120,7:2",
    "v32:128:1,600,64:1",
    "v32:64:1,333,16:2",
};

// Queries arrive during the launch, if the backend has kernels for it. The cases have parts that
// end in the middle of a tile, items one after another in one unit, more than one query row, and
// few heads.
inline constexpr const char* kDirectedStreams[] = {
    "absorbed:128:1,1500,64/1,33,64/1,700,64/1,1023,64/1,0,64:8",
    "absorbed:64:1,2000,16/1,300,16/1,5,7:8",
    "absorbed:20:3,900,64/7,31,64/2,400,16,full:8",
    "absorbed:128:2,600,64/3,1100,3/1,64,64:8",
    "absorbed:40:5,129,7/1,0,7/64,3,7:8",
    "absorbed:17:1,4000,64:8",
    // A last piece of more rows than the others; new rows in two pieces and on two pages.
    "absorbed:32:2,767,64/4,254,16,full:8",
};

// One tile in equal pieces, whose blocks fit the eight units of the fake device at a time: pages of
// different sizes, contexts around a tile's end, query rows that see no key of the last piece,
// fewer rows than a block has, and rows that do not fill the last block. The first ones are
// launches of small blocks, the others of large ones.
inline constexpr const char* kDirectedSplits[] = {
    "absorbed:64:1,600,64:8",  "absorbed:32:1,639,3:8",  "absorbed:16:1,2300,16:8",
    "absorbed:16:3,128,64:8",  "absorbed:8:1,127,128:8", "absorbed:20:3,400,7:8",
    "absorbed:1:60,10,16:8",   "absorbed:4:9,1000,1:8",  "absorbed:128:1,1500,64:4",
    "absorbed:128:1,700,1:4",  "absorbed:96:1,1201,3:3", "absorbed:64:2,1030,128:4",
    "absorbed:64:1,2900,64:8", "absorbed:24:5,511,16:2",
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_HOST_CASES_H_
