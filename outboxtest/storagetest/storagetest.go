package storagetest

import (
	"context"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// The outboxes that an Instance has. Orders and Mails share a table; Audit has
// one of its own.
const (
	Orders = "orders"
	Mails  = "mails"
	Audit  = "audit"
)

// Tx is a transaction of a caller. *sql.Tx is one.
type Tx interface {
	engine.Tx
	Commit() error
	Rollback() error
}

// Harness makes what the suite tests.
type Harness struct {
	// New makes an instance over new, empty tables, and registers with t what
	// has to be cleaned up. Required.
	New func(t *testing.T) Instance
	// ConcurrentWriters says that several transactions can insert at the same
	// time, so that Insert has to serialise those of one group.
	ConcurrentWriters bool
}

// Instance is a storage with what the suite needs to do beside it. All fields
// but Peer are required. The functions report their own errors to t.
type Instance struct {
	Storage engine.Storage
	// Peer is a second node's storage over the same tables. Nil where only one
	// process can relay; then Storage takes its part.
	Peer engine.Storage
	// Begin starts a transaction of a publisher, on a connection of its own.
	Begin func(t *testing.T) Tx
	// SetPartitions records the partition count that is in force from now on,
	// as Repartition does before it moves anything.
	SetPartitions func(t *testing.T, outbox string, n int)
	// SetPaused records whether the outbox is paused for the whole cluster.
	SetPaused func(t *testing.T, outbox string, paused bool)
	// SetDue makes a pending message due at a time relative to the storage's
	// clock; a negative one has passed.
	SetDue func(t *testing.T, outbox string, id int64, in time.Duration)
	// Revive makes a dead message pending again, as RetryDead does: no
	// attempts, due at the epoch.
	Revive func(t *testing.T, outbox string, id int64)
}

// Run checks the harness's storage against every promise of engine.Storage.
func Run(t *testing.T, h Harness) {
	groups := []struct {
		name  string
		tests []test
	}{
		{"Insert", insertTests},
		{"Claim", claimTests},
		{"Fetch", fetchTests},
		{"Blocked", blockedTests},
		{"Due", dueTests},
		{"Settle", settleTests},
		{"Probe", probeTests},
		{"Remap", remapTests},
		{"Prune", pruneTests},
		{"Concurrent", concurrentTests},
	}
	for _, group := range groups {
		t.Run(group.name, func(t *testing.T) {
			t.Parallel()
			for _, test := range group.tests {
				t.Run(test.name, func(t *testing.T) {
					t.Parallel()
					test.run(newFixture(t, h))
				})
			}
		})
	}
}

type test struct {
	name string
	run  func(f *fixture)
}

// fixture is an instance with shorthands. Its methods end the test on errors.
type fixture struct {
	*testing.T
	Instance
	harness Harness
	ctx     context.Context
}

func newFixture(t *testing.T, h Harness) *fixture {
	f := &fixture{T: t, Instance: h.New(t), harness: h, ctx: t.Context()}
	if f.Peer == nil {
		f.Peer = f.Storage
	}
	return f
}

// message makes a row of outbox Orders as Add would. The type names it.
func message(group, typ string) engine.Row {
	return engine.Row{
		Outbox: Orders, GroupKey: group, Hash: engine.GroupHash(group), Lock: group != "",
		Type: typ, Payload: []byte(typ),
	}
}

// messages makes a row of each type in one group.
func messages(group string, types ...string) []engine.Row {
	rows := make([]engine.Row, len(types))
	for i, typ := range types {
		rows[i] = message(group, typ)
	}
	return rows
}

// add inserts the rows in a transaction of their own and returns their ids.
func (f *fixture) add(rows ...engine.Row) []int64 {
	f.Helper()
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, rows, true)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	return ids(stored)
}

// begin starts a transaction that is rolled back, at the latest, when the test
// ends.
func (f *fixture) begin() Tx {
	f.Helper()
	tx := f.Begin(f.T)
	f.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// lane is lane 0 of 1 of Orders, where everything is unless SetPartitions said
// otherwise.
var lane = engine.Lane{Outbox: Orders, Partition: 0, Partitions: 1}

// query is what most tests ask.
func query() engine.Query { return engine.Query{Limit: 100, MaxBytes: 1 << 20} }

// peek fetches from the lane and leaves everything as it is.
func (f *fixture) peek(lane engine.Lane, q engine.Query) engine.Page {
	f.Helper()
	var page engine.Page
	err := f.Storage.WithPartition(f.ctx, lane, func(ctx context.Context, c engine.Claim) (err error) {
		page, err = c.Fetch(ctx, q)
		return err
	})
	f.must("fetch", err)
	return page
}

// claim runs fn with a claim on the lane that has fetched.
func (f *fixture) claim(lane engine.Lane, fn func(ctx context.Context, c engine.Claim, page engine.Page) error) error {
	return f.Storage.WithPartition(f.ctx, lane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, query())
		if err != nil {
			return err
		}
		return fn(ctx, c, page)
	})
}

func (f *fixture) settle(s engine.Settlement) {
	f.Helper()
	f.must("settle", f.Storage.Settle(f.ctx, Orders, s))
}

// fail charges a first attempt; the next one is due after delay.
func (f *fixture) fail(delay time.Duration, ids ...int64) {
	f.Helper()
	var s engine.Settlement
	for _, id := range ids {
		s.Failed = append(s.Failed, engine.Failure{ID: id, Delay: delay, Error: "refused"})
	}
	f.settle(s)
}

// kill makes messages dead at their first attempt.
func (f *fixture) kill(ids ...int64) {
	f.Helper()
	var s engine.Settlement
	for _, id := range ids {
		s.Dead = append(s.Dead, engine.Failure{ID: id, Error: "hopeless"})
	}
	f.settle(s)
}

func (f *fixture) must(what string, err error) {
	f.Helper()
	if err != nil {
		f.Fatalf("%s: %v", what, err)
	}
}

// wantTypes checks what a page holds, in order.
func (f *fixture) wantTypes(page engine.Page, want ...string) {
	f.Helper()
	if page.State != engine.PageOpen {
		f.Fatalf("page state = %d, want open", page.State)
	}
	wantEqual(f, "fetched", types(page.Envelopes), want)
}

func (f *fixture) wantState(page engine.Page, want engine.PageState) {
	f.Helper()
	if page.State != want || len(page.Envelopes) > 0 {
		f.Errorf("page state = %d with %d messages, want %d with none", page.State, len(page.Envelopes), want)
	}
}

func ids(envelopes []engine.Envelope) []int64 {
	list := make([]int64, len(envelopes))
	for i := range envelopes {
		list[i] = envelopes[i].ID
	}
	return list
}

func types(envelopes []engine.Envelope) []string {
	list := make([]string, len(envelopes))
	for i := range envelopes {
		list[i] = envelopes[i].Type
	}
	return list
}

// wantEqual compares lists; nil and empty are the same.
func wantEqual[T comparable](f *fixture, what string, got, want []T) {
	f.Helper()
	same := len(got) == len(want)
	for i := 0; same && i < len(got); i++ {
		same = got[i] == want[i]
	}
	if !same {
		f.Errorf("%s = %v, want %v", what, abridged(got), abridged(want))
	}
}

func abridged[T any](list []T) []T { return list[:min(len(list), 20)] }
