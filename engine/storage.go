package engine

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// ErrBusy is returned by Claim.Fetch when another worker owns the partition.
var ErrBusy = errors.New("outbox: partition is owned by another worker")

// Tx is the caller's open transaction, as far as a storage needs it. *sql.Tx
// is one.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Row is a message to insert. The root package has validated it: the texts are
// valid UTF-8 without NUL and within their bounds.
type Row struct {
	Outbox   string
	GroupKey string // empty: none
	Hash     uint64 // GroupHash(GroupKey), or any number if there is no group
	Lock     bool   // serialise with other publishers of the same group
	LockAll  bool   // with Lock: the group is the whole outbox (Total order)
	Type     string
	Payload  []byte // nil and empty are the same
	Headers  map[string]string
	// DeliverAt is when the message is due; zero: at once, or after Delay by
	// the database's clock. At most one of the two is set. A DeliverAt that
	// has passed by the database's clock means at once.
	DeliverAt time.Time
	Delay     time.Duration
}

// Lane is one partition under one partition count. The count is part of its
// name: a message that was added under another count is not in the lane, even
// where the partition's number is the same (see Storage.Remap).
type Lane struct {
	Outbox     string
	Partition  int
	Partitions int
}

// Wake is a hint that a message of the outbox may be ready. It is never data:
// a lost, doubled or late hint costs time, not messages.
type Wake struct {
	Outbox string // empty: every outbox
	Hash   uint64 // of the group; the partition is Hash % the count in force
	All    bool   // every partition of the outbox
}

// Query says what to fetch.
type Query struct {
	// Limit is the largest number of messages, at least 1.
	Limit int
	// MaxBytes bounds the sum of the payloads, except that one message is
	// always fetched however large it is.
	MaxBytes int
	// Ordering decides what a failed message that waits for its retry blocks:
	// its group (ByGroup), the whole lane (Total) or itself (None).
	Ordering Ordering
	// HoldDead also leaves out every group (ByGroup) or the lane (Total) that
	// has a dead message.
	HoldDead bool
	// SkipGroups and SkipIDs are left out of this fetch alone: messages under
	// suspicion while a worker narrows down a failing batch. Both are short.
	SkipGroups []string
	SkipIDs    []int64
	// Lease is how long a delivery may last: the time after which a storage
	// that can tell may take the ownership from an owner that does nothing.
	Lease time.Duration
}

// PageState says why a page may be empty.
type PageState int

const (
	// PageOpen: the envelopes are all that was ready, up to the limits.
	PageOpen PageState = iota
	// PagePaused: the outbox is paused for the whole cluster.
	PagePaused
	// PageMoved: the partition count in force is no longer the lane's.
	PageMoved
	// PageStray: pending messages lie in lanes of another partition count, so
	// no group may be touched until Remap has moved them.
	PageStray
)

// Page is the outcome of a fetch.
type Page struct {
	State     PageState
	Envelopes []Envelope
	// More says that a limit ended the page: more messages may be ready.
	More bool
	// Now is the database's clock at the fetch.
	Now time.Time
	// NextDue is how long until the next message of the lane becomes due: a
	// retry or a delayed one. Negative: none. Filled in when More is false.
	NextDue time.Duration
}

// Failure is a charged attempt.
type Failure struct {
	ID int64
	// Attempts is Envelope.Attempts as it was fetched. If the stored number
	// differs, somebody else has settled the message and it is left alone.
	Attempts int
	// Delay is the time from the settling to the next attempt; unused where
	// the message becomes dead.
	Delay time.Duration
	Error string // at most MaxErrorBytes, valid UTF-8 without NUL
}

// Settlement is what became of a batch. Applying it twice is the same as
// applying it once, so that one whose outcome is unknown can be repeated.
type Settlement struct {
	Delivered []int64
	Keep      bool // keep the delivered ones as such, instead of deleting them
	Failed    []Failure
	Dead      []Failure
}

// Empty reports whether there is nothing to settle.
func (s *Settlement) Empty() bool {
	return len(s.Delivered) == 0 && len(s.Failed) == 0 && len(s.Dead) == 0
}

// Facts is what the database records of an outbox.
type Facts struct {
	Partitions int  // in force; 1 for an outbox that was never started
	Paused     bool // for the whole cluster
}

// Probed is what one look at a table found of one outbox.
type Probed struct {
	Facts
	// Ready lists the partitions that have a message to be delivered at once,
	// or due. It may be blocked behind its group: only a fetch can tell.
	Ready []int
	// Stray says that messages wait in lanes of another partition count.
	Stray bool
	// NextDue is how long until the next message becomes due, by partition.
	// A partition without any has no entry.
	NextDue map[int]time.Duration
}

// PruneQuery bounds one pruning statement.
type PruneQuery struct {
	Outbox string
	// Delivered and Dead are the retention of messages kept after delivery and
	// of dead ones. Negative: leave them.
	Delivered, Dead time.Duration
	Limit           int
}

// Storage keeps the messages of an instance. All methods are safe for
// concurrent use, honour their context, and leave nothing open when they fail.
//
// The contract of an adapter, in the order of importance:
//
//   - Insert takes part in the caller's transaction. A store that cannot do
//     that is no storage of an outbox.
//   - At most one claim in the whole cluster owns a lane at a time, and
//     ownership ends when its owner dies, by itself.
//   - Fetch returns ready messages in id order, messages with a due time of
//     their own by that time, and leaves out every group with a failed message
//     that waits for its retry.
//
// outboxtest/storagetest checks an adapter against it.
type Storage interface {
	// Insert adds the rows through the caller's transaction, in one statement
	// for each table. Ids rise in the order of rows. Before any id is drawn it
	// takes the group locks of all rows that ask for one, held until the
	// transaction ends, so that overlapping publishers of a group are
	// serialised; a database with a single writer needs none. If returning is
	// set it gives the stored envelopes in the order of rows; otherwise nil.
	Insert(ctx context.Context, tx Tx, rows []Row, returning bool) ([]Envelope, error)

	// Notify tells the other nodes of the wakes: through tx, becoming visible
	// with its commit, or at once if tx is nil. A storage without such a
	// channel does nothing.
	Notify(ctx context.Context, tx Tx, wakes []Wake) error

	// WithPartition runs fn with a claim on the lane, on one connection.
	// When fn returns nil the claim's settlement is committed; otherwise, and
	// if fn panics, it is dropped. Ownership has ended when WithPartition
	// returns. A *SettleError says that the settlement could not be recorded
	// or that its outcome is unknown.
	WithPartition(ctx context.Context, lane Lane, fn func(ctx context.Context, c Claim) error) error

	// Settle applies a settlement on its own, outside any claim: the way to
	// record what a claim could not.
	Settle(ctx context.Context, outbox string, s Settlement) error

	// Probe looks once at each table for the given outboxes and says which
	// partitions have something to do. Its cost does not depend on the number
	// of messages.
	Probe(ctx context.Context, outboxes []string) (map[string]Probed, error)

	// Remap moves up to limit messages, pending and dead, out of lanes of
	// another partition count into those of the count in force, taking the
	// ownership of each lane it empties. It returns how many it moved and
	// whether any are left; moved 0 with more true means that a lane was busy.
	Remap(ctx context.Context, outbox string, limit int) (moved int, more bool, err error)

	// Prune deletes up to q.Limit messages past their retention, in one short
	// transaction, and returns how many. It never waits for another pruner.
	Prune(ctx context.Context, q PruneQuery) (int, error)
}

// Claim is a worker's hold on a lane. Its methods are called by one goroutine
// at a time, except Alive.
type Claim interface {
	// Fetch first commits what Settle was given, then takes the ownership of
	// the lane anew and returns what is ready. ErrBusy says that another
	// worker owns it. Between two fetches another worker may have owned the
	// lane. A *SettleError as in WithPartition.
	Fetch(ctx context.Context, q Query) (Page, error)

	// Settle says what became of the fetched messages. It is recorded by the
	// next Fetch, or when the claim ends.
	Settle(s Settlement)

	// Alive returns nil while the claim still owns the lane as far as can be
	// told without delay, and ErrOwnershipLost otherwise. It may be called
	// while the relay works, from several goroutines.
	Alive(ctx context.Context) error

	// Watch calls lost, at most once and from another goroutine, when it
	// notices that the ownership is gone. The returned function ends the
	// watch, and lost is not called after it has returned.
	Watch(lost func()) (stop func())
}

// SettleError says that a settlement could not be recorded, or that its
// outcome is unknown. The settlement can be repeated with Storage.Settle.
type SettleError struct {
	Settlement Settlement
	Err        error
}

func (e *SettleError) Error() string { return "settle: " + e.Err.Error() }
func (e *SettleError) Unwrap() error { return e.Err }

// Exclusive is implemented by a storage that only one process may relay from.
type Exclusive interface {
	// Exclude keeps other processes from relaying until release is called or
	// the process dies. It waits for a while, then fails with
	// ErrAlreadyRunning.
	Exclude(ctx context.Context) (release func() error, err error)
}
