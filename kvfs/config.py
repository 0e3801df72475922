"""Limits that hold everywhere: sizes in bytes, times in seconds. `kvfs.settings` is what people
may set."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

PAGE_BYTES = 4096
NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4096
CHUNK_BYTES_MAX = GIB
CHUNK_HEADER_BYTES_MAX = 4 * MIB
FILES_MAX = 10_000_000

# Local socket between the node and its clients.
FRAME_BYTES_MAX = 16 * MIB
BATCH_ITEMS_MAX = 4096  # paths or files in one request
DESCRIPTORS_PER_MESSAGE_MAX = 200  # the kernel takes 253
CLIENTS_MAX = 256
STAGES_PER_CLIENT_MAX = 1024
CLIENT_DEADLINE_S = 10.0
BRING_WAIT_S = 2.0  # how long one request waits for what is not here; who asks again waits on
LOCATE_WAIT_S = 0.5  # the same for who asks where files are, behind whom others wait
CONFIG_WAIT_S = 5.0  # for who writes a configuration into a pipe
CLIENT_START_INTERVAL_S = 20.0  # between two tries to start a node, where another owns the store

META_BYTES_MAX = 16 * GIB  # address space of the LMDB map; the file grows as it is used
META_READERS_MAX = 16
META_IDENTITY_BYTES = 8
META_INODES_CACHED_MAX = 65_536  # about 30 MiB
META_DIRECTORIES_CACHED_MAX = 65_536
DISK_FIGURES_S = 0.005  # how old what a disk says of its room may be
DIRECTORY_AVOIDED_S = 10.0  # where no file could be made, while others are there
FREE_INODES = 1024  # of a disk: what is stored leaves before fewer are free
META_MODELS_CACHED_MAX = 64  # of each, where its 256 directories are
META_SYNC_INTERVAL_S = 2.0
CHUNK_INDEX_ROWS_MIN = 262_144  # of 24 bytes; twice as many as chunk files
CHUNK_INDEX_STEP = 1000  # directory entries read in one go when a node starts: 3 ms
CHUNK_INDEX_WAITING_MAX = 1000  # changes of which it does not know yet

# A cluster's names, on a server.
CLUSTER_DEADLINE_S = 0.5  # for each word of the server
CLUSTER_BACKOFF_S = 0.5  # how long a server that did not answer is left alone
CLUSTER_BACKOFF_S_MAX = 8.0  # each time twice as long, until a thread that waits hears it again
CLUSTER_LISTEN_S = 1.0  # how long a node waits for news before it asks again
CLUSTER_STRANGE_S = 0.1  # until a node looks again at a feed to which somebody else wrote
CLUSTER_LOOK_S = 10.0  # between two looks at what the server does when it is full
CLUSTER_SAID_S = (
    60.0  # until the log says once more why a node is cut off, where that goes to and fro
)
CLUSTER_LEASE_S = 3.0  # how long a node that says nothing is still a member
CLUSTER_RENEW_S = 0.5
CLUSTER_CHANGES_KEPT = 2048  # nodes that came or went last; who has missed more is told all
CLUSTER_HOLDERS_ASKED_MAX = 8  # nodes, of those that have a file, that are asked for it in one go
CLUSTER_FETCHES_MAX = 32  # files that a node fetches at the same time
CLUSTER_PULLS_MAX = 8  # parts of them that are read at the same time, each in a thread
CLUSTER_SILENCE_S = 1.0  # a node that gives nothing for so long is left, while another has the file
CLUSTER_HOLDER_WAIT_S = 2.0  # for a node that has a file to give it, when none does at once
CLUSTER_FETCH_S = 30.0  # how long a file of usual size is waited for, and longer for a large one
CLUSTER_SLOW_BYTES_S = 10 * MIB  # who fetches a large one more slowly is not waited for
CLUSTER_READ_S = 30.0  # how long a reader waits for a part of a file that is being fetched
CLUSTER_DOUBTS_MAX = 1024  # files of which some node gave wrong bytes
FETCH_WHOLE_BYTES = 4 * MIB  # a file of no more is open only when all of it is here
FETCH_PIECE_BYTES = MIB
FETCH_RUN_PIECES = 4  # read from a node in one go, fewer where that takes longer than
FETCH_RUN_WANTED_S = 0.2
FETCH_RUNS_MAX = 2  # of one file at the same time
FETCH_RUN_S = 30.0
FETCH_TRIES_MAX = 4  # of a file whose bytes are wrong
PEER_CHECK_WAIT_S = 0.5  # how long a peer waits for the check of a file before it goes out
PEER_CHECKS_MAX = 2  # files read whole at the same time, for peers
SERVED_FILES_MAX = 16  # that stay open for who reads them, whatever becomes of their names
SERVED_S = 5.0  # after the last read
CLUSTER_PAGE_MEMBERS = 1000  # names read in one go
CLUSTER_RECORDS_CACHED_MAX = 131_072  # of each table: about 100 MiB
CLUSTER_NAMES_TOLD_MAX = 65_536  # files that others stored last, not asked for yet: 20 MiB
CLUSTER_GROUPS_CACHED_MAX = 65_536
CLUSTER_CONFLICTS_MAX = 64  # tries of one change, while others change the same names
RECHECK_STEP = 16  # files of this node compared in one go: a round trip each
REFILL_STEP = 100  # names given back in one go
WAYS_STEP = 16  # files to which the way from the root is learned in one go: a round trip each
WAYS_WAITING_MAX = 65_536  # such files that wait for it
CLUSTER_JOURNAL_ENTRIES = 4096  # of its last transactions, which a server may lose
CLUSTER_JOURNAL_RECORDS = 32_768  # in all of them: about 10 MiB
CLUSTER_UNSETTLED_MAX = 65_536  # files of which the server may say wrongly that they are here
CLUSTER_REDO_TRIES = 3  # of a transaction that a server lost; others may have to do theirs first
CLUSTER_FIRST_SEARCH_S = 3.0  # for the server to be found when a node starts
CLUSTER_SERVERS_MAX = 16  # metadata servers, or Sentinels, that a node asks for the one to use
ADOPTION_STEP = 100  # names of a store that was alone that are looked up in one go
CLUSTER_FORMER_MAX = 8  # ids that a store had, and whose copies may still be on the server
CLUSTER_SEARCH_RETRY_S = 5.0  # until a search for own files that was cut short begins again
SEARCH_BLOBS = 256  # that lie here, looked at in one go
CLUSTER_SWEEP_KEYS = 2000  # of the server, looked at in one go: 1 ms of it
CLUSTER_SWEEP_PAUSE_S = 0.005
ABANDONED_AFTER_S = 600.0  # how long what a node left unfinished waits for it to come back
ABANDONED_CHECK_S = 30.0
ABANDONED_NODES_MAX = 16  # seen to at a time
ABANDONED_STEP = 16  # files of such a node dropped in one go: a round trip or two each
ABANDONED_PAUSE_S = 0.05
CLUSTER_CLAIMS_MAX = 16  # ranges of inode numbers that a node asks for
CLUSTER_NUMBERS_SKIPPED = 65_536  # of 2^32 in a range, at each start after the first
CLUSTER_FEED_ENTRIES = 65_536  # a node that was away for longer forgets all that it knew
CLUSTER_NEWS_ENTRIES = 512  # heard in one go
META_ANSWER_BYTES_MAX = 64 * MIB  # of one answer of the metadata server about news
CLUSTER_CATCH_UP_ENTRIES = 8192  # 0.4 s of the node's thread; who is behind by more forgets all

# Copies of one file on several nodes.
CLUSTER_NODES_MAX = 1000
COPY_RULES_MAX = 256
COPIES_WAITING_MAX = 65_536  # files stored here of which other nodes are still to be told
COPIES_SETTLE_S = 0.5  # after which a new file has the name that it will keep
COPIES_STEP = 64  # files looked at in one go: a round trip
COPIES_STEP_S = 0.05  # between two such steps: 1 million files take 15 minutes
COPIES_ASKED_PER_S = 50_000  # of the server by all nodes together: so large clusters are slower
COPIES_SWEEP_S = 10.0  # between two rounds over all files of a node
COPIES_PATHS_MAX = 16  # names of one file that are compared with the rules
COPIES_ASKED_MAX = 256  # digests of which a client asks for the holders in one go
CLUSTER_GONE_S = 15.0  # how long the copies of a node that went still count: it may be back
HINTS_WAITING_MAX = 65_536  # blobs that other nodes want to be here
HINTED_FETCHES_MAX = 4  # of them fetched at the same time, beside what readers wait for
PEER_WORD_S = 2.0  # for a peer to take hints, or to say how it is
PEER_ROOM_S = 2.0  # how long it is believed what it said of its room
PEER_ROOMS_ASKED_MAX = 32  # of a large cluster, in one go
DRAIN_FILES_MAX = 256  # on their way to other nodes at the same time
DRAIN_BYTES_MAX = 512 * MIB
DRAIN_TICK_S = 0.05  # between two looks at what has arrived
DRAIN_AGAIN_S = 5.0  # after which a node that is leaving looks again at what only it has
DRAIN_TRIES_MAX = 3  # nodes that are asked to take one file
DRAIN_LEFT_SHOWN = 100  # names of what no node takes

FOREIGN_SHOWN_MAX = 256  # paths of what gc leaves, told one by one
QUARANTINE_FILES_MAX = 64
QUARANTINE_BYTES_MAX = GIB
EVICTION_QUESTIONS_MAX = 1024  # about files, in one decision: milliseconds
VERIFIED_MAX = 262_144  # digests remembered as checked since the node started
USES_WAITING_MAX = 128  # files in use of which the metadata does not know yet: 2 ms to write
OPEN_BLOBS_ENDED_MAX = 16  # closed files that a start after a crash reads again: 0.2 s
ORPHANS_MAX = 65_536  # removed files that wait for metadata that can be written
EVICTION_WINDOW = 64  # coldest files of which those go first that other nodes have as well
EVICTION_BATCH = 24  # files taken away in one go: more would hold the node for over 10 ms
IDLE_EXIT_S = 30.0  # a node that a client started leaves this long after its last client

# The bridge, in an engine's process.
BRIDGE_CHUNK_TOKENS = 256
BRIDGE_THREADS = 4
BRIDGE_STAGING_BYTES = 256 * MIB  # of buffers between files and the engine's blocks
BRIDGE_DEADLINE_S = (
    10.0  # for all the chunks of one request to arrive, and for each word to the node
)
BRIDGE_LOOKUP_DEADLINE_S = 2.0  # a look-up that takes longer finds nothing
BRIDGE_PROBE_INTERVAL_S = 1.0  # how often a node that went away is asked whether it is back
BRIDGE_SLOT_DEADLINE_S = 2.0  # a save without a buffer for so long is dropped
BRIDGE_SETTLE_DEADLINE_S = 5.0  # a save keeps its request's blocks no longer than that
BRIDGE_FENCE_DEADLINE_S = 0.2  # a step waits so long for a copy out of a block that it will reuse
BRIDGE_SHUTDOWN_DEADLINE_S = 10.0
BRIDGE_LOOKUPS_MAX = 1024  # requests that wait for their look-up
BRIDGE_SAVES_MAX = 512  # chunks that wait to be saved
BRIDGE_OPEN_BATCH = 16  # chunks that are opened together; a request has few more open
BRIDGE_EXPECT_AFTER_S = 0.02  # a request that waits so long is worth a word to the node
BRIDGE_EXPECT_AGAIN_S = 60.0  # until a node that brings nothing by itself is told once more
BRIDGE_EXPECTED_REQUESTS_MAX = 256  # of which the node is still to be told
BRIDGE_EXPECTED_CHUNKS_MAX = 1024  # of one request
BRIDGE_SUSPECTS_MAX = 4096  # chunks that did not hold what their name says

# The mount.
KERNEL_CACHE_S = 60.0  # how long the kernel may keep names and attributes; changes are told to it
ON_THE_WAY_S = 1.0  # how long an open may take from its name to the mount
STALE_NAMES_MAX = 65_536  # changes that wait to be told to the kernel
CACHED_DIGESTS_MAX = 65_536  # files of which the mount knows what the kernel has cached
REPEATED_OPEN_S = 5.0  # within it, an open that was sent back to look again is back
UNCHANGED_S = 1.0  # a file that did not change for so long may be served by the kernel itself
SETTLE_QUIET_S = 0.05  # nobody made a file or closed a large one for so long: those are published
SETTLE_AGE_S = 1.0  # or one has waited for it so long
SETTLE_BYTES_MAX = GIB  # in all that wait; a close that would exceed it publishes by itself
SETTLE_WAIT_S = 10.0  # how long a writer waits for that, or a stop
SETTLE_SEEN_S = 4.0  # how long a client does, who gives up after CLIENT_DEADLINE_S
SETTLE_ROOM_S = 2.0  # how long who needs room does
SETTLE_RETRY_S = 5.0  # what cannot be published is tried again
REQUEST_WAIT_US = 100  # how long a mount waits for who got an answer to ask again, before all else
REUSED_S = 10.0  # how long pyfuse3 keeps the answer to an open of a file that nobody opens again
REUSED_LOOK_S = 1.0  # how often the mount looks what became of such answers, and of their files
REUSED_MAX = 256  # such files; each holds a descriptor
LINGER_S = 1.0  # how long a file outlives its last name, for who has just looked it up
LINGERING_MAX = 4096  # such files
SENT_BACK_MAX = 4096  # such opens
THROUGH_ROOM_BYTES_MIN = CHUNK_BYTES_MAX  # with less room Python writes, and says when it is full
STAGE_STEP_BYTES_MAX = 16 * MIB  # how far a growing file's room is reserved ahead
LISTED_NAMES_MAX = 1_000_000  # of one open directory, for seekdir
VIEW_CONTENT_BYTES_MAX = 16 * MIB  # what `.kvfs` keeps of the files that it shows
MOUNT_START_DEADLINE_S = 600.0  # recovery after a crash of the machine reads all chunk headers
MOUNT_STOP_DEADLINE_S = 30.0
STORE_HANDOVER_S = 10.0  # how long a mount waits for a node that is giving its store up
MOUNT_PROBE_S = 5.0  # for an old mount to answer, before it counts as hanging
LOG_BYTES_MAX = 16 * MIB  # node.log, and as much again in node.log.1

# Between nodes. What a message may hold; `PeerLimits` has the rest.
PEER_FRAME_BYTES_MAX = MIB
PEER_BATCH_ITEMS_MAX = 4096  # digests or ranges in one message
PEER_READ_BYTES_MAX = 512 * KIB  # of one answer inside the channel
PEER_TEXT_BYTES_MAX = 1024

# Between a client and the nodes that its own refers it to.
REFERRAL_DEADLINE_S = 1.0  # for a peer to give tickets
REFERRED_MAX = 65_536  # files of which is known how often clients read them elsewhere
PEER_TICKETS_ASKED_MAX = 256  # of one peer, in one word of a client
REMOTE_NODES_MAX = 1024  # that a client keeps streams to
REMOTE_STREAMS_MAX = 16  # to one node
REMOTE_PROGRESS_S = 1.0  # without a byte, the file is got in another way

# A process that reads from all places itself (`kvfs.reader`).
READER_DEADLINE_S = 60.0  # for all files of one call, when the caller says nothing
READER_BATCH_FILES = 64  # that are located together; two batches are read at the same time
READER_BATCH_BYTES = 256 * MIB  # of them, in memory until they are copied; one file may always
READER_TICKET_S = 20.0  # how long a ticket that came unasked is used; its node forgets it later
READER_TICKETS_KEPT_MAX = 4096  # of one node
READER_TICKET_DEADLINE_S = 4.0  # for a word about another node, which may wait for its turn
READER_TIER_OPEN_S = 2.0  # how long a chunk that only a tier has waits for that to be opened
READER_TIER_AGAIN_S = 5.0  # until a tier that could not be opened is tried again
READER_COMPLAINTS_MAX = 64  # corrupt chunks that the node is still to be told of
READER_PEERS_MAX = 24  # nodes that are read at the same time, of the schedule's tiers

# Health of a tier (`kvfs.health`).
TIER_HEALTH_HALF_LIFE_S = 10.0  # in which what went wrong loses half its weight
TIER_FAILURES_MAX = 3.0  # in a row, or that many and a share of all, and the tier is down
TIER_FAILED_SHARE_MAX = 0.3
TIER_PAUSE_S_MIN = 0.5  # until a tier that is down is tried again; twice as long each time
TIER_PAUSE_S_MAX = 30.0

# Tiers.
TIERS_MAX = 64
TIER_NAME_MAX = 64
TIER_CONCURRENCY_MAX = 1024
TIER_DEADLINE_S_MAX = 600.0
TIER_QUESTIONS_MAX = 4  # of each kind other than reads and writes, at the same time
TIER_STUCK_MAX = 16  # threads that a file system holds; with more, its tier fails at once
TIER_STALL_S_MIN = 1.0  # whose caller waited less tells nothing of the tier
TIER_PIECE_BYTES = 8 * MIB  # of a blob on its way into a tier, in memory
TIER_SHOWN_BYTES = MIB  # copied to a reader's buffer in one go: who leaves may wait so long
TIER_STAGING_LEFT_S = 3600.0  # a staging file that nobody has written to for so long is nobody's
OBJECT_LIST_ITEMS = 1000  # names in one answer of an object store
OBJECT_HEADS_MAX = 16  # objects asked for in one question at the same time
OBJECT_CONNECT_S = 5.0
OBJECT_MARK_S = 10.0  # between looks at a bucket's mark while blobs are put
OBJECT_MARK_OLD_S = 3600.0  # then it is made anew: rules of a bucket may remove what is old

# A node and its tiers (`kvfs.tiering`).
TIER_RULES_MAX = 256
TIERS_OPEN_WAIT_S = 2.0  # how long a start waits for its tiers to open; later ones join in then
TIERS_OPEN_AGAIN_S = 5.0  # until a tier that could not be opened is tried again
TIER_FETCHES_MAX = 16  # files that come from tiers at the same time
TIER_ASKED_MAX = 16  # questions to tiers at the same time, of all: each takes a thread
TIER_FETCH_S = 30.0  # how long a file of usual size is waited for, and longer for a large one
TIER_SLOW_BYTES_S = 10 * MIB  # who reads a large one more slowly is not waited for
TIER_OPEN_TRIES = 3  # of a file that went back to tiers before it was opened
TIER_LEAD_S = 1.0  # how long tiers are waited for before other nodes are asked as well
TIER_CLOSE_S = 2.0  # for reads to end when a node does
BEHIND_WAITING_MAX = 65_536  # blobs that are to be copied to tiers
BEHIND_PUTS_MAX = 4  # copied at the same time
BEHIND_SETTLE_S = 0.5  # after which a new file has the name that it will keep
BEHIND_YIELD_S = 1.0  # how long a copy waits for reads to end
BEHIND_AGAIN_S = 10.0  # until a copy that failed is tried again
BEHIND_LOAD_STEP = 1000  # promises of before that are read in one go
TIER_FULL_S = 30.0  # how long a tier that was full is not put to
TIER_USES_MAX = 65_536  # files of which it is known that they were read, for rules of second use
READS_SETTLE_S = 0.1  # after descriptors were handed out, their reader is taken to read
DEMOTE_S = 20.0  # how long who needs room waits for last copies to reach a tier
TIER_EVICTION_WINDOW = 256  # blobs of a tier of which the coldest go
TIER_EVICTION_SHARE = 0.25  # of that window
TIER_MOVES_MAX = 2  # last copies on their way from a tier to another one
TIER_WINDOWS_MAX = 64  # looked at for one blob
TIER_WINDOWS_SPARING_MAX = 4  # where no last copy may go
TIER_SCAN_AGAIN_S = 60.0  # until a look that a tier's trouble ended is tried again
TIER_SCAN_S = 600.0  # between two looks at all that lies in a tier that others fill, where this
TIER_SCAN_RARE_S = 86_400.0  # node evicts from it, and where it does not
TIER_SCAN_PAUSE_S = 0.1  # between two parts of such a look
TIER_TROUBLE_ROW = 3  # calls of one kind failed in a row, and the tier is said to be in trouble
TIER_TROUBLE_S = 1.0  # how late that is in the log
TIER_METER_S = 1.0  # over which it is said how many bytes a tier gives and takes now
TIER_LOOK_S = 10.0  # how old what is shown of a tier's room may be

# Which tier reads what (`kvfs.schedule`).
SCHEDULE_TIERS_MAX = 64
SCHEDULE_JOBS_MAX = 4096
SCHEDULE_CHUNKS_MAX = 262_144  # unread, of all jobs: about 60 MiB
SCHEDULE_STRETCH = 4.0  # so many times as long as it would take alone may a job be overtaken
SCHEDULE_PRIORITY_S = 2.0  # of waiting that one step of priority is worth
SCHEDULE_PRIORITY_MAX = 4  # steps up or down
SCHEDULE_PRIORITY_IDLE = -100  # read only while nobody waits for anything else
SCHEDULE_JOBS_EXAMINED = 4  # for one decision
SCHEDULE_JOBS_SHORT_EXAMINED = 64  # the same, of those that wait for memory
SCHEDULE_HEDGES_EXAMINED = 8
SCHEDULE_COPIES_MAX = 2  # reads of the same bytes at the same time
SCHEDULE_HEDGE_SHARE = 0.1  # of reads that may repeat late ones before other work
SCHEDULE_HEDGE_CREDIT_MAX = 16.0
SCHEDULE_HEDGE_GAIN_MIN = 0.25  # of a read's time, that must be gained by repeating another
SCHEDULE_PIECE_BYTES_MIN = 256 * KIB  # of a chunk that is read in parts
SCHEDULE_PIECES_MAX = 16
SCHEDULE_TRIES_MAX = 8  # failures of one chunk; tiers that have it not are not counted
SCHEDULE_LATE_FACTOR = 2.0  # times as long as expected, and a read is late
SCHEDULE_LATE_S_MIN = 0.005
SCHEDULE_STALL_FACTOR = 30.0  # the same, and it is given up
SCHEDULE_STALL_S_MIN = 1.0
SCHEDULE_BYTES_PER_S = float(GIB)  # expected of a tier of which nothing is known
SCHEDULE_LATENCY_S = 0.001
SCHEDULE_PACE_HALF_LIFE_S = 0.5  # of how fast a tier is of late
SCHEDULE_LINE_HALF_LIFE_S = 10.0  # of what its latency is, and its time for a byte
SCHEDULE_RATES_FRESH_S = 0.01  # how long a sum over tiers is believed
SCHEDULE_ASKED_MAX = 4  # idle tiers that are offered one range
SCHEDULE_ASK_S_MIN = 0.001  # until a tier that left something to others is asked again
SCHEDULE_ASK_S_MAX = 1.0
SCHEDULE_READS_FIRST = 2  # of a tier at the same time, before anything was measured
SCHEDULE_WINDOW_READS = 4  # for each slot, between two looks at how many there should be
SCHEDULE_WINDOW_S = 0.05

# `kvfs replay`.
REPLAY_REQUESTS_MAX = 1_000_000
REPLAY_REQUEST_BLOCKS_MAX = 65_536  # of one request: 32 million tokens
REPLAY_LINE_BYTES_MAX = 2 * MIB  # more of a line is not read
REPLAY_BLOCK_BYTES = 64 * MIB  # 512 tokens of 128 KiB
REPLAY_STAGING_BYTES = 512 * MIB  # that blocks are read into
REPLAY_SLOTS_MIN = 8  # blocks that are read into it at the same time, however large
REPLAY_DEADLINE_S = 600.0  # for the load of one request

# What is brought here before it is asked for (`kvfs.prefetch`).
PREFETCH_BLOBS_MAX = 8  # on their way at the same time
PREFETCH_BYTES_MAX = 256 * MIB  # of them; one that is larger comes alone, and no guess does
PREFETCH_ORDERS_MAX = 65_536  # blobs that engines expect, or that a person warms, and that wait
PREFETCH_GUESSES_MAX = 256  # that wait; of more the oldest are dropped
PREFETCH_EXAMINED_MAX = 64  # that wait, of one cause, for one decision
PREFETCH_CHILDREN_MAX = 16  # a chunk that more than these continue says nothing of what comes next
PREFETCH_DESCENDANTS_MAX = 8  # guessed of one read of a chunk
PREFETCH_FOLLOWERS_MAX = 4  # guessed of one read of another file
PREFETCH_GUESS_S = 10.0  # after which a guess that waits has come too late
PREFETCH_EXPECTED_S = 60.0  # the same, of what an engine expects
PREFETCH_TRIES_MAX = 3  # of what was expected or warmed, and was cancelled or failed
PREFETCH_UNUSED_MAX = 65_536  # brought here and not read yet: more are not judged
PREFETCH_SWEPT_MAX = 256  # of them looked at in one go, whether they are still here: 2 ms
PREFETCH_WASTED_MAX = 4096  # evicted unread: not guessed again until somebody reads them
PREFETCH_FILES_MAX = 16_384  # of which is known what was read after them: about 8 MiB
PREFETCH_FOLLOWERS_KEPT = 4  # of each
PREFETCH_FOLLOWERS_COUNTED = 16  # reads after one file; with more all its counts are halved
PREFETCH_READERS_MAX = 1024  # of which is known what they read last
PREFETCH_READS_MAX = 1024  # that wait to be looked at; of more the oldest are not
PREFETCH_STEP = 16  # of what is asked for, between turns of everyone else
PREFETCH_LOOK_S = 0.05  # between two looks whether sources are busy, while anything is wanted
PREFETCH_SETTLE_S = 0.1  # after a read, before a guess comes: its reader may ask for it itself
PREFETCH_READER_BYTES_S = 512 * MIB  # how fast who reads elsewhere is taken to do so
PREFETCH_ELSEWHERE_S_MAX = 5.0  # and for how long at most it is, after the last that began
PREFETCH_SWEEP_S = 5.0  # between two looks whether what was brought is still here
PREFETCH_FETCH_S = 30.0  # how long a blob of usual size may take, and longer for a large one
PREFETCH_READ_AFTER_S = 10.0  # a file that is read later than that has not followed the last one
WARM_WINDOW_FILES = 1024  # of `kvfs warm`, asked for at the same time
WARM_WINDOW_BYTES = 512 * MIB  # of them, and one more
WARM_REPLY_S = 0.25  # after which a node says how far it is

# Threads and memory that carry out the schedule (`kvfs.transfer`).
TRANSFER_SCRATCH_READS = 4  # that repeat others, at the same time: each has memory of its own
TRANSFER_SCRATCH_BYTES = 256 * MIB  # of it in all, where it is not a pool's; one chunk may always
TRANSFER_PIECE_BYTES = 8 * MIB  # read in one call of a local tier, and hashed while the next comes
TRANSFER_CALLBACKS_MAX = 16  # threads more than reads are under way
TRANSFER_RECHECKS_MAX = 256  # blobs of a tier that gave wrong bytes, to be looked at

SIZE_BYTES_MAX = 1024 * 1024 * 1024 * GIB  # 1 EiB: more is a slip of the pen
COUNT_MAX = 1_000_000  # the same
READ_AHEAD_KIB_MAX = 1024 * 1024

STORE_VERSION = 1


def whole_pages(size_bytes: int) -> int:
    """A size rounded up to a multiple of `PAGE_BYTES`."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What a node grants its peers, and how long it waits for them."""

    # As a server.
    connections_max: int = 2048  # of channels, with or without a session
    unshown_bytes_max: int = 96 * MIB  # that zmq keeps of one connection; queues take 16 MiB
    sessions_max: int = 1024
    sessions_per_peer_max: int = 128
    session_idle_s: float = 300.0
    session_requests_max: int = 16  # that one session may have unanswered
    requests_max: int = 1024  # unanswered, of all sessions
    workers: int = 16  # threads that ask the source, and may wait for a check of it
    tickets_max: int = 65_536
    tickets_per_session_max: int = 4096
    ticket_life_s: float = 30.0
    streams_max: int = 256
    stream_idle_s: float = 60.0
    stream_bytes_per_s_min: int = 256 * KIB  # who reads slower has its stream closed
    # As a client, of each peer.
    channels_max: int = 4
    streams_per_peer_max: int = 8
    read_window: int = 8  # of reads inside the channel that are unanswered
    backoff_s_min: float = 0.1
    backoff_s_max: float = 10.0
    # As either.
    handshake_s: float = 5.0
    heartbeat_s: float = 5.0
    progress_s: float = 5.0  # without a byte, the other side counts as stalled
    close_s: float = 5.0  # for threads to leave
