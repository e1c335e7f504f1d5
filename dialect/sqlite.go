package dialect

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// SQLite keeps messages in a SQLite database, through any database/sql driver.
// It implements engine.Storage and engine.Exclusive.
//
// A database has one writer at a time, so a transaction that lasted as long as
// a delivery would stop the application. Therefore a batch is read, delivered
// outside any transaction, and settled in one short write; lanes are owned in
// memory, and Exclude keeps a second process from relaying. All instants are
// taken from Config.Now, because the database has no clock of its own.
//
// Statements that find the database busy are tried again until they succeed or
// their context ends, except those in the caller's transaction (Insert), which
// only the caller can repeat. While SQLite itself waits for a lock, at most the
// connection's busy_timeout, the end of a context is not noticed.
type SQLite struct {
	db       *sql.DB
	now      func() time.Time
	outboxes map[string]*liteOutbox
	tables   []*liteTable // each once, in the order of their names
	lanes    laneSet

	excludeWait time.Duration
}

var (
	_ engine.Storage   = (*SQLite)(nil)
	_ engine.Exclusive = (*SQLite)(nil)
)

// NewSQLite makes a storage over db. It does not touch the database: the tables
// are the migrator's, and Check looks at the settings.
func NewSQLite(db *sql.DB, cfg Config) (*SQLite, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("sqlite storage: %w", err)
	}
	s := &SQLite{db: db, now: cfg.Now, outboxes: make(map[string]*liteOutbox, len(cfg.Outboxes)), excludeWait: excludeWait}
	if s.now == nil {
		s.now = time.Now
	}
	byName := make(map[tables.Name]*liteTable)
	for outbox, name := range cfg.Outboxes {
		if name.Schema != "" {
			return nil, fmt.Errorf("sqlite storage: outbox %q: SQLite has no schemas, got %q", outbox, name.Schema)
		}
		t := byName[name]
		if t == nil {
			t = newLiteTable(name)
			byName[name] = t
			s.tables = append(s.tables, t)
		}
		s.outboxes[outbox] = &liteOutbox{liteTable: t, name: outbox, insert: newInsertForms(name, outbox)}
	}
	slices.SortFunc(s.tables, func(a, b *liteTable) int { return cmp.Compare(a.table.Table, b.table.Table) })
	return s, nil
}

// outbox finds what is known of an outbox.
func (s *SQLite) outbox(name string) (*liteOutbox, error) {
	if o := s.outboxes[name]; o != nil {
		return o, nil
	}
	return nil, fmt.Errorf("sqlite storage: unknown outbox %q", name)
}

// micros is the time as the database holds it.
func (s *SQLite) micros() int64 { return s.now().UnixMicro() }

// Notify does nothing: other processes find messages by polling.
func (s *SQLite) Notify(context.Context, engine.Tx, []engine.Wake) error { return nil }

// WithPartition implements engine.Storage. The claim holds no connection.
func (s *SQLite) WithPartition(ctx context.Context, lane engine.Lane, fn func(context.Context, engine.Claim) error) error {
	o, err := s.outbox(lane.Outbox)
	if err != nil {
		return err
	}
	c := &liteClaim{storage: s, outbox: o, lane: lane}
	defer c.end()
	if err := fn(ctx, c); err != nil {
		return err
	}
	return c.flush(ctx)
}

// liteClaim is a worker's hold on a lane: an entry in the storage's laneSet.
type liteClaim struct {
	storage *SQLite
	outbox  *liteOutbox
	lane    engine.Lane
	pending engine.Settlement

	mu    sync.Mutex
	state claimState
}

type claimState int

const (
	claimIdle claimState = iota // nothing fetched yet, or the lane was busy
	claimOwner
	claimEnded
)

// Fetch implements engine.Claim. A lane that is owned stays so until the claim
// ends.
func (c *liteClaim) Fetch(ctx context.Context, q engine.Query) (engine.Page, error) {
	if err := c.flush(ctx); err != nil {
		return engine.Page{}, err
	}
	if err := c.own(); err != nil {
		return engine.Page{}, err
	}
	return c.storage.fetch(ctx, c.outbox, c.lane, q)
}

func (c *liteClaim) own() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state == claimOwner:
		return nil
	case c.state == claimEnded:
		return errors.New("fetch: the claim has ended")
	case !c.storage.lanes.take(c.lane):
		return engine.ErrBusy
	}
	c.state = claimOwner
	return nil
}

func (c *liteClaim) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == claimOwner {
		c.storage.lanes.release(c.lane)
	}
	c.state = claimEnded
}

// Settle implements engine.Claim.
func (c *liteClaim) Settle(s engine.Settlement) {
	c.pending.Delivered = append(c.pending.Delivered, s.Delivered...)
	c.pending.Failed = append(c.pending.Failed, s.Failed...)
	c.pending.Dead = append(c.pending.Dead, s.Dead...)
	c.pending.Keep = s.Keep
}

// flush records what Settle was given. What cannot be recorded is handed to
// the caller and forgotten here.
func (c *liteClaim) flush(ctx context.Context) error {
	s := c.pending
	c.pending = engine.Settlement{}
	if err := c.storage.settle(ctx, c.outbox, s); err != nil {
		return &engine.SettleError{Settlement: s, Err: err}
	}
	return nil
}

// Alive implements engine.Claim. Nothing can take a lane from a claim before
// its end.
func (c *liteClaim) Alive(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != claimOwner {
		return engine.ErrOwnershipLost
	}
	return nil
}

// Watch implements engine.Claim: there is nothing to notice.
func (c *liteClaim) Watch(func()) (stop func()) { return func() {} }

// laneSet holds the lanes that are owned in this process, by outbox and number:
// the same partition under two counts has one owner. Its zero value is empty.
type laneSet struct {
	mu    sync.Mutex
	owned map[laneKey]struct{}
}

type laneKey struct {
	outbox    string
	partition int
}

func keyOf(l engine.Lane) laneKey { return laneKey{l.Outbox, l.Partition} }

// take owns the lane unless somebody does.
func (s *laneSet) take(l engine.Lane) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.owned[keyOf(l)]; taken {
		return false
	}
	if s.owned == nil {
		s.owned = make(map[laneKey]struct{})
	}
	s.owned[keyOf(l)] = struct{}{}
	return true
}

func (s *laneSet) release(l engine.Lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.owned, keyOf(l))
}

// liteTable is a message table with the statements that work on it.
type liteTable struct {
	table   tables.Name
	fetch   map[fetchShape]fetchSQL
	settle  settleSQL
	probe   string
	remap   remapSQL
	prune   string
	pruning sync.Mutex
}

// liteOutbox is an outbox and its table.
type liteOutbox struct {
	*liteTable
	name   string
	insert insertForms
}

func newLiteTable(name tables.Name) *liteTable {
	names := strings.NewReplacer(
		"{messages}", name.Messages(),
		"{meta}", name.Meta(),
		"{ready}", name.Index("_ready"),
		"{due}", name.Index("_due"),
		"{failed}", name.Index("_failed"),
		"{dead}", name.Index("_dead"),
		"{dead_at}", name.Index("_dead_at"),
		"{delivered}", name.Index("_delivered"),
	)
	return &liteTable{
		table:  name,
		fetch:  newFetchSQL(names),
		settle: newSettleSQL(names),
		probe:  names.Replace(probeText),
		remap:  newRemapSQL(names),
		prune:  names.Replace(pruneText),
	}
}
