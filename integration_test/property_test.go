package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/glebarez/sqlite"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/internal/testdb"
)

const (
	orders      = "orders"
	maxAttempts = 3
)

// TestModel compares random histories with the model, on both databases:
// overlapping transactions, commits, rollbacks, savepoints, failures, outages,
// interrupted batches, dead letters, retries, discards, pauses, changes of the
// partition count and restarts. Nothing is lost, nothing invented, groups come
// in the order of their commits. C01 C17 C42 C43 C47 C56
func TestModel(t *testing.T) {
	t.Parallel()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Postgres(t).SQL(t)
		rapid.Check(t, func(rt *rapid.T) {
			newMachine(rt, 3, func() gorm.Dialector { return postgres.New(postgres.Config{Conn: pool}) }).run()
		})
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		pool := testdb.SQLite(t).SQL(t)
		rapid.Check(t, func(rt *rapid.T) {
			newMachine(rt, 1, func() gorm.Dialector { return sqlite.Dialector{Conn: pool} }).run()
		})
	})
}

var tables atomic.Int64

// machine drives an instance and the model side by side.
type machine struct {
	*rapid.T
	*model
	open     func() gorm.Dialector
	table    string
	writers  int // transactions that may be open at a time
	db       *gorm.DB
	instance *outbox.Instance
	next     int
	paused   bool
	txs      []*transaction

	relaying sync.Mutex // partitions deliver side by side
	plan     plan
}

// transaction is an open one, with what it has added so far.
type transaction struct {
	tx     *gorm.DB
	added  []*message
	saves  []int // len(added) at each savepoint
	groups map[string]bool
}

// plan is what the relay will do.
type plan struct {
	outage    bool
	interrupt int          // after so many messages; negative: never
	fail      map[int]bool // by number; true: permanently
	cancel    context.CancelFunc
}

func newMachine(rt *rapid.T, writers int, open func() gorm.Dialector) *machine {
	m := &machine{
		T: rt, model: newModel(maxAttempts), open: open, writers: writers,
		table: fmt.Sprintf("outbox_%d", tables.Add(1)),
	}
	m.restart(rt)
	m.must(outbox.AutoMigrate(m.db))
	return m
}

func (m *machine) run() {
	m.Repeat(map[string]func(*rapid.T){
		"":            m.check,
		"begin":       m.begin,
		"add":         m.add,
		"savepoint":   m.savepoint,
		"rollbackTo":  m.rollbackTo,
		"commit":      m.commitTx,
		"rollback":    m.rollback,
		"deliver":     m.deliver,
		"deliverMore": m.deliver,
		"retryNow":    m.retryNow,
		"retryDead":   m.retryDead,
		"markDead":    m.markDead,
		"discard":     m.discard,
		"repartition": m.repartition,
		"pause":       m.pause,
		"restart":     m.restart,
	})
	m.finish()
}

func (m *machine) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatalf("%v", err)
	}
}

// check is run after each step.
func (m *machine) check(*rapid.T) {
	if len(m.fault) > 0 {
		m.Fatalf("%s", m.faults())
	}
}

// restart makes a new instance over the same tables, as a new process does.
func (m *machine) restart(rt *rapid.T) {
	db, err := gorm.Open(m.open(), &gorm.Config{
		Logger: logger.Discard, PrepareStmt: rapid.Bool().Draw(rt, "prepare"), DisableNestedTransaction: false,
	})
	m.must(err)
	m.instance, err = outbox.New(outbox.Config{Table: m.table, Outboxes: []outbox.Outbox{{
		Name: orders, Relay: m, Partitions: 0,
		BatchSize:   rapid.IntRange(1, 5).Draw(rt, "batch"),
		Backoff:     backoff.Constant(time.Hour),
		MaxAttempts: maxAttempts,
	}}})
	m.must(err)
	m.must(db.Use(m.instance))
	m.db = db
}

func (m *machine) begin(rt *rapid.T) {
	if len(m.txs) >= m.writers {
		rt.Skip("enough transactions are open")
	}
	tx := m.db.Begin(&sql.TxOptions{})
	m.must(tx.Error)
	m.txs = append(m.txs, &transaction{tx: tx, groups: make(map[string]bool)})
}

func (m *machine) draw(rt *rapid.T) *transaction {
	if len(m.txs) == 0 {
		rt.Skip("no transaction is open")
	}
	return m.txs[rapid.IntRange(0, len(m.txs)-1).Draw(rt, "transaction")]
}

// add adds messages to groups that no other open transaction has added to:
// there it would wait.
func (m *machine) add(rt *rapid.T) {
	t := m.draw(rt)
	free := []string{""}
	for _, g := range []string{"a", "b", "c", "d"} {
		busy := false
		for _, other := range m.txs {
			busy = busy || other != t && other.groups[g]
		}
		if !busy {
			free = append(free, g)
		}
	}
	var events []outbox.Event
	var added []*message
	for range rapid.IntRange(1, 4).Draw(rt, "messages") {
		m.next++
		msg := &message{n: m.next, group: rapid.SampledFrom(free).Draw(rt, "group")}
		t.groups[msg.group] = true
		added = append(added, msg)
		events = append(events, outbox.Message{Type: "t", GroupKey: msg.group, Payload: []byte(strconv.Itoa(msg.n))})
	}
	stored, err := outbox.AddReturning(t.tx, events...)
	m.must(err)
	for i, env := range stored {
		added[i].id, added[i].dedup = env.ID, env.DedupID()
	}
	t.added = append(t.added, added...)
}

func (m *machine) savepoint(rt *rapid.T) {
	t := m.draw(rt)
	t.saves = append(t.saves, len(t.added))
	m.must(t.tx.SavePoint(fmt.Sprintf("s%d", len(t.saves))).Error)
}

func (m *machine) rollbackTo(rt *rapid.T) {
	t := m.draw(rt)
	if len(t.saves) == 0 {
		rt.Skip("no savepoint")
	}
	n := rapid.IntRange(1, len(t.saves)).Draw(rt, "savepoint")
	m.must(t.tx.RollbackTo(fmt.Sprintf("s%d", n)).Error)
	t.added = t.added[:t.saves[n-1]]
	t.saves = t.saves[:n]
}

func (m *machine) commitTx(rt *rapid.T) {
	t := m.draw(rt)
	m.must(t.tx.Commit().Error)
	m.model.commit(t.added)
	m.drop(t)
}

func (m *machine) rollback(rt *rapid.T) {
	t := m.draw(rt)
	m.must(t.tx.Rollback().Error)
	m.drop(t)
}

func (m *machine) drop(t *transaction) {
	for i := range m.txs {
		if m.txs[i] == t {
			m.txs = append(m.txs[:i], m.txs[i+1:]...)
			return
		}
	}
}

// idle skips a step that writes outside the open transactions, where these
// would keep it waiting: SQLite has one writer.
func (m *machine) idle(rt *rapid.T) {
	if m.writers == 1 && len(m.txs) > 0 {
		rt.Skip("the writer is busy")
	}
}

// deliver drains once, with a relay that does as drawn.
func (m *machine) deliver(rt *rapid.T) {
	m.idle(rt)
	m.plan = plan{interrupt: -1, fail: make(map[int]bool)}
	switch rapid.IntRange(0, 9).Draw(rt, "mood") {
	case 0:
		m.plan.outage = true
	case 1:
		m.plan.interrupt = rapid.IntRange(0, 3).Draw(rt, "interrupt")
	case 2, 3, 4:
		for _, n := range m.pick(pending) {
			if rapid.IntRange(0, 2).Draw(rt, "fails") == 0 {
				m.plan.fail[n] = rapid.IntRange(0, 4).Draw(rt, "permanently") == 0
			}
		}
	}
	m.drain()
}

func (m *machine) drain() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	m.plan.cancel = cancel
	before := len(m.pick(delivered))
	result, err := m.instance.Drain(ctx)
	switch {
	case errors.Is(err, context.Canceled) && m.plan.interrupt >= 0:
		return
	case err != nil:
		m.Fatalf("drain: %v", err)
	case m.paused && result.Delivered > 0:
		m.Fatalf("delivered %d messages of a paused outbox", result.Delivered)
	case m.paused || m.plan.outage:
		return
	}
	if after := len(m.pick(delivered)); after-before != result.Delivered {
		m.Fatalf("drain says that it delivered %d messages, the relay got %d", result.Delivered, after-before)
	}
	if left := m.stranded(); len(left) > 0 {
		m.Fatalf("messages %v are ready but were not delivered", left)
	}
}

// Deliver is the relay.
func (m *machine) Deliver(ctx context.Context, batch []outbox.Envelope) error {
	m.relaying.Lock()
	defer m.relaying.Unlock()
	if m.plan.outage {
		return errors.New("the destination is down")
	}
	var failed outbox.BatchError
	blocked := make(map[string]bool)
	sent := make([]*message, 0, len(batch))
	for i, env := range batch {
		if m.plan.interrupt == i {
			for _, msg := range sent {
				msg.state, msg.maybe = pending, true
			}
			m.plan.cancel()
			<-ctx.Done()
			return ctx.Err()
		}
		if env.GroupKey != "" && blocked[env.GroupKey] {
			failed.Fail(env.ID, outbox.ErrNotAttempted)
			continue
		}
		n, _ := strconv.Atoi(string(env.Payload))
		msg := m.sent(n, env.DedupID(), env.Attempts)
		if permanent, fails := m.plan.fail[n]; fails {
			delete(m.plan.fail, n)
			blocked[env.GroupKey] = true
			err := errors.New("refused")
			if permanent {
				err = outbox.Permanent(err)
			}
			failed.Fail(env.ID, err)
			m.model.failed(msg, permanent)
			continue
		}
		msg.state, msg.maybe, msg.revived = delivered, false, false
		sent = append(sent, msg)
	}
	if len(failed.Failed) > 0 {
		return &failed
	}
	return nil
}

func (m *machine) retryNow(rt *rapid.T) {
	m.idle(rt)
	_, err := m.instance.RetryNow(context.Background(), orders, outbox.Filter{MinAttempts: 1})
	m.must(err)
	for _, n := range m.pick(waiting) {
		m.byN[n].state = pending
	}
}

// some draws ids of messages in the given states.
func (m *machine) some(rt *rapid.T, states ...state) (list []*message, ids []int64) {
	m.idle(rt)
	all := m.pick(states...)
	if len(all) == 0 {
		rt.Skip("no such message")
	}
	for _, n := range rapid.SliceOfNDistinct(rapid.SampledFrom(all), 1, min(3, len(all)), rapid.ID).Draw(rt, "messages") {
		list = append(list, m.byN[n])
		ids = append(ids, m.byN[n].id)
	}
	return list, ids
}

func (m *machine) retryDead(rt *rapid.T) {
	list, ids := m.some(rt, dead)
	n, err := m.instance.RetryDead(context.Background(), orders, ids...)
	m.must(err)
	m.counted(n, len(ids))
	for _, msg := range list {
		msg.state, msg.tries, msg.revived = pending, 0, true
	}
}

func (m *machine) markDead(rt *rapid.T) {
	list, ids := m.some(rt, pending, waiting)
	n, err := m.instance.MarkDead(context.Background(), orders, ids...)
	m.must(err)
	m.counted(n, len(ids))
	for _, msg := range list {
		msg.state, msg.revived = dead, false
	}
}

func (m *machine) discard(rt *rapid.T) {
	list, ids := m.some(rt, pending, waiting, dead)
	n, err := m.instance.Discard(context.Background(), orders, ids...)
	m.must(err)
	m.counted(n, len(ids))
	for _, msg := range list {
		msg.state = discarded
	}
}

func (m *machine) counted(got, want int) {
	if got != want {
		m.Fatalf("%d messages were changed, want %d", got, want)
	}
}

func (m *machine) repartition(rt *rapid.T) {
	m.idle(rt)
	m.must(m.instance.Repartition(context.Background(), orders, rapid.IntRange(1, 5).Draw(rt, "partitions")))
}

func (m *machine) pause(rt *rapid.T) {
	m.idle(rt)
	if m.paused {
		m.must(m.instance.Resume(context.Background(), orders))
	} else {
		m.must(m.instance.Pause(context.Background(), orders))
	}
	m.paused = !m.paused
}

// finish heals everything and expects every committed message to have gone out.
func (m *machine) finish() {
	for len(m.txs) > 0 {
		t := m.txs[0]
		m.must(t.tx.Commit().Error)
		m.model.commit(t.added)
		m.drop(t)
	}
	if m.paused {
		m.must(m.instance.Resume(context.Background(), orders))
		m.paused = false
	}
	ctx := context.Background()
	_, err := m.instance.RetryNow(ctx, orders, outbox.Filter{MinAttempts: 1})
	m.must(err)
	_, err = m.instance.RetryDeadWhere(ctx, orders, outbox.Filter{Status: outbox.Dead})
	m.must(err)
	for _, n := range m.pick(waiting, dead) {
		if m.byN[n].state == dead {
			m.byN[n].tries, m.byN[n].revived = 0, true
		}
		m.byN[n].state = pending
	}
	m.plan = plan{interrupt: -1}
	m.drain()
	m.check(nil)
	if left := m.pick(pending, waiting, dead); len(left) > 0 {
		m.Fatalf("messages %v were never delivered", left)
	}
	var rows int64
	m.must(m.db.Raw("SELECT count(*) FROM " + m.table).Scan(&rows).Error)
	if rows != 0 {
		m.Fatalf("%d rows are left in the table", rows)
	}
}
