package engine_test

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// memory is a storage in memory, faithful to the contract as far as an engine
// can tell. Its clock is the process's.
type memory struct {
	mu       sync.Mutex
	nextID   int64
	outboxes map[string]*memoryOutbox
	owners   map[engine.Lane]*memoryClaim

	probes, fetches, settles, prunes int

	// What goes wrong: asked with the lock held, before the work is done.
	onProbe  func() error
	onFetch  func(engine.Lane) error
	onCommit func(engine.Lane, engine.Settlement) error // a claim's settlement
	onSettle func() error                               // one on its own
	onPrune  func() error
	slow     func(ctx context.Context) // waits at the beginning of each probe, without the lock
}

type memoryOutbox struct {
	engine.Facts
	rows []*memoryRow // by id
}

type memoryRow struct {
	engine.Envelope
	partitions int
	hash       uint64
	due        time.Time // zero: at once
	status     string    // "", "delivered" or "dead"
	since      time.Time // of the status
}

func newMemory(partitions map[string]int) *memory {
	m := &memory{outboxes: make(map[string]*memoryOutbox), owners: make(map[engine.Lane]*memoryClaim)}
	for name, n := range partitions {
		m.outboxes[name] = &memoryOutbox{Facts: engine.Facts{Partitions: n}}
	}
	return m
}

var _ engine.Storage = (*memory)(nil)

// add commits messages, one a group; "" is none.
func (m *memory) add(outbox string, groups ...string) []int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []int64
	for _, group := range groups {
		ids = append(ids, m.insert(outbox, group, time.Time{}).ID)
	}
	return ids
}

// addDelayed commits a message that is due after d.
func (m *memory) addDelayed(outbox, group string, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.insert(outbox, group, time.Now().Add(d))
}

func (m *memory) insert(outbox, group string, due time.Time) *memoryRow {
	m.nextID++
	o := m.outboxes[outbox]
	row := &memoryRow{partitions: o.Partitions, hash: engine.GroupHash(group), due: due}
	if group == "" {
		row.hash = uint64(m.nextID)
	}
	now := time.Now()
	row.Envelope = engine.Envelope{
		ID: m.nextID, Installation: "test", Outbox: outbox, GroupKey: group, Type: "test",
		Payload: []byte("payload"), InsertedAt: now, ScheduledAt: now,
		Partition: engine.Partition(row.hash, o.Partitions),
	}
	if !due.IsZero() {
		row.ScheduledAt = due
	}
	o.rows = append(o.rows, row)
	return row
}

// set changes the facts of "orders", as another node would.
func (m *memory) set(change func(*engine.Facts)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.outboxes[orders].Facts)
}

// faults changes what goes wrong.
func (m *memory) faults(change func(*memory)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(m)
}

// pending gives the ids of the pending messages of "orders".
func (m *memory) pending() []int64 { return m.with("") }

func (m *memory) with(status string) []int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []int64
	for _, row := range m.outboxes[orders].rows {
		if row.status == status {
			ids = append(ids, row.ID)
		}
	}
	return ids
}

// row gives a copy of a message's row; nil if there is none.
func (m *memory) row(id int64) *memoryRow {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.outboxes {
		for _, row := range o.rows {
			if row.ID == id {
				found := *row
				return &found
			}
		}
	}
	return nil
}

// own makes another node own a lane until release is called.
func (m *memory) own(lane engine.Lane) (release func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	other := &memoryClaim{memory: m, lane: lane}
	m.owners[lane] = other
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		other.release()
	}
}

// lose takes a lane from its owner, who is told if it watches.
func (m *memory) lose(lane engine.Lane) {
	m.mu.Lock()
	c := m.owners[lane]
	var watch func()
	if c != nil {
		c.lost = true
		watch = c.watch
		c.release()
	}
	m.mu.Unlock()
	if watch != nil {
		watch()
	}
}

func (m *memory) counts() (probes, fetches int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.probes, m.fetches
}

// ready gives the rows of a lane that can be delivered, in order, and the time
// until the next becomes due.
func (o *memoryOutbox) ready(lane engine.Lane, q engine.Query) (rows []*memoryRow, nextDue time.Duration) {
	now := time.Now()
	nextDue = -1
	failed, waiting := make(map[string]bool), make(map[string]bool)
	block := func(row *memoryRow, in map[string]bool) {
		switch {
		case q.Ordering == engine.Total:
			in[""] = true
		case q.Ordering == engine.ByGroup && row.GroupKey != "":
			in[row.GroupKey] = true
		}
	}
	var lanes []*memoryRow
	for _, row := range o.rows {
		if row.partitions != lane.Partitions || row.Partition != lane.Partition {
			continue
		}
		switch {
		case row.status == "dead" && q.HoldDead:
			block(row, failed)
			block(row, waiting)
		case row.status == "":
			lanes = append(lanes, row)
			if row.Attempts > 0 {
				block(row, failed)
			}
			if row.Attempts > 0 && row.due.After(now) {
				block(row, waiting)
			}
		}
	}
	for _, row := range lanes {
		if wait := row.due.Sub(now); wait > 0 {
			if nextDue < 0 || wait < nextDue {
				nextDue = wait
			}
			continue
		}
		by := failed
		if row.Attempts > 0 || q.Ordering == engine.Total {
			by = waiting
		}
		group := row.GroupKey
		if q.Ordering == engine.Total {
			group = ""
		}
		if !by[group] && !slices.Contains(q.SkipIDs, row.ID) && !slices.Contains(q.SkipGroups, row.GroupKey) {
			rows = append(rows, row)
		}
	}
	return rows, nextDue
}

func (o *memoryOutbox) stray() bool {
	return slices.ContainsFunc(o.rows, func(r *memoryRow) bool { return r.status == "" && r.partitions != o.Partitions })
}

// settle applies a settlement.
func (o *memoryOutbox) settle(s engine.Settlement) {
	now := time.Now()
	o.rows = slices.DeleteFunc(o.rows, func(r *memoryRow) bool {
		if r.status != "" || !slices.Contains(s.Delivered, r.ID) {
			return false
		}
		r.status, r.since = "delivered", now
		return !s.Keep
	})
	charge := func(f engine.Failure, status string) {
		for _, r := range o.rows {
			if r.ID == f.ID && r.Attempts == f.Attempts && r.status == "" {
				r.Attempts++
				r.LastError, r.status, r.since = f.Error, status, now
				r.due = now.Add(f.Delay)
				r.ScheduledAt = r.due
			}
		}
	}
	for _, f := range s.Failed {
		charge(f, "")
	}
	for _, f := range s.Dead {
		charge(f, "dead")
	}
}

func (m *memory) Settle(ctx context.Context, outbox string, s engine.Settlement) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settles++
	if m.onSettle != nil {
		if err := m.onSettle(); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	m.outboxes[outbox].settle(s)
	return nil
}

func (m *memory) Probe(ctx context.Context, outboxes []string) (map[string]engine.Probed, error) {
	m.mu.Lock()
	slow := m.slow
	m.mu.Unlock()
	if slow != nil {
		slow(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.probes++
	if m.onProbe != nil {
		if err := m.onProbe(); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	found := make(map[string]engine.Probed)
	for _, name := range outboxes {
		if o := m.outboxes[name]; o != nil {
			found[name] = o.probe()
		}
	}
	return found, nil
}

// probe is coarser than a fetch: it does not look at groups.
func (o *memoryOutbox) probe() engine.Probed {
	p := engine.Probed{Facts: o.Facts, Stray: o.stray(), NextDue: make(map[int]time.Duration)}
	for _, r := range o.rows {
		if r.status != "" || r.partitions != o.Partitions {
			continue
		}
		wait := time.Until(r.due)
		if r.due.IsZero() || wait <= 0 {
			p.Ready = append(p.Ready, r.Partition)
		} else if next, ok := p.NextDue[r.Partition]; !ok || wait < next {
			p.NextDue[r.Partition] = wait
		}
	}
	slices.Sort(p.Ready)
	p.Ready = slices.Compact(p.Ready)
	return p
}

func (m *memory) Remap(_ context.Context, outbox string, limit int) (moved int, more bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := m.outboxes[outbox]
	for _, r := range o.rows {
		if r.status == "delivered" || r.partitions == o.Partitions {
			continue
		}
		old := engine.Lane{Outbox: outbox, Partition: r.Partition, Partitions: r.partitions}
		if moved == limit || m.owners[old] != nil {
			more = true
			continue
		}
		r.partitions, r.Partition = o.Partitions, engine.Partition(r.hash, o.Partitions)
		moved++
	}
	return moved, more, nil
}

func (m *memory) Prune(_ context.Context, q engine.PruneQuery) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.prunes++
	if m.onPrune != nil {
		if err := m.onPrune(); err != nil {
			return 0, err
		}
	}
	n := 0
	o := m.outboxes[q.Outbox]
	o.rows = slices.DeleteFunc(o.rows, func(r *memoryRow) bool {
		keep := map[string]time.Duration{"delivered": q.Delivered, "dead": q.Dead, "": -1}[r.status]
		if keep < 0 || time.Since(r.since) < keep || n == q.Limit {
			return false
		}
		n++
		return true
	})
	return n, nil
}

func (m *memory) Insert(context.Context, engine.Tx, []engine.Row, bool) ([]engine.Envelope, error) {
	return nil, errors.New("messages are added by the test")
}

func (m *memory) Notify(context.Context, engine.Tx, []engine.Wake) error { return nil }

func (m *memory) WithPartition(ctx context.Context, lane engine.Lane, fn func(context.Context, engine.Claim) error) error {
	c := &memoryClaim{memory: m, lane: lane}
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		c.release()
	}()
	if err := fn(ctx, c); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return c.commit(ctx)
}

// memoryClaim is a hold on a lane; the memory's lock guards it.
type memoryClaim struct {
	memory  *memory
	lane    engine.Lane
	lost    bool
	watch   func()
	pending engine.Settlement
}

func (c *memoryClaim) release() {
	if c.memory.owners[c.lane] == c {
		delete(c.memory.owners, c.lane)
	}
}

// commit records the settlement.
func (c *memoryClaim) commit(ctx context.Context) error {
	s := c.pending
	c.pending = engine.Settlement{}
	if s.Empty() {
		return nil
	}
	err := ctx.Err()
	if c.lost {
		err = engine.ErrOwnershipLost
	}
	if hook := c.memory.onCommit; err == nil && hook != nil {
		err = hook(c.lane, s)
	}
	if err != nil {
		return &engine.SettleError{Settlement: s, Err: err}
	}
	c.memory.outboxes[c.lane.Outbox].settle(s)
	return nil
}

func (c *memoryClaim) Fetch(ctx context.Context, q engine.Query) (engine.Page, error) {
	m := c.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fetches++
	if err := c.commit(ctx); err != nil {
		return engine.Page{}, err
	}
	c.release()
	if err := ctx.Err(); err != nil {
		return engine.Page{}, err
	}
	if m.onFetch != nil {
		if err := m.onFetch(c.lane); err != nil {
			return engine.Page{}, err
		}
	}
	if m.owners[c.lane] != nil {
		return engine.Page{}, engine.ErrBusy
	}
	m.owners[c.lane] = c
	c.lost = false
	return m.outboxes[c.lane.Outbox].page(c.lane, q), nil
}

func (o *memoryOutbox) page(lane engine.Lane, q engine.Query) engine.Page {
	page := engine.Page{Now: time.Now(), NextDue: -1}
	switch {
	case o.Partitions != lane.Partitions:
		page.State = engine.PageMoved
		return page
	case o.Paused:
		page.State = engine.PagePaused
		return page
	case o.stray():
		page.State = engine.PageStray
		return page
	}
	rows, nextDue := o.ready(lane, q)
	slices.SortStableFunc(rows, func(a, b *memoryRow) int { return cmp.Compare(a.ID, b.ID) })
	if page.More = len(rows) > q.Limit; page.More {
		rows = rows[:q.Limit]
	} else {
		page.NextDue = nextDue
	}
	for _, r := range rows {
		page.Envelopes = append(page.Envelopes, r.Envelope)
	}
	return page
}

func (c *memoryClaim) Settle(s engine.Settlement) {
	c.memory.mu.Lock()
	defer c.memory.mu.Unlock()
	c.pending = s
}

func (c *memoryClaim) Alive(context.Context) error {
	c.memory.mu.Lock()
	defer c.memory.mu.Unlock()
	if c.lost {
		return engine.ErrOwnershipLost
	}
	return nil
}

func (c *memoryClaim) Watch(lost func()) (stop func()) {
	c.memory.mu.Lock()
	defer c.memory.mu.Unlock()
	c.watch = lost
	return func() {
		c.memory.mu.Lock()
		defer c.memory.mu.Unlock()
		c.watch = nil
	}
}
