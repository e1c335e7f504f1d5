package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// cutShort cancels a context after a number of writes.
type cutShort struct {
	adminSyntax
	after  int
	cancel context.CancelFunc
}

func (c *cutShort) write(ctx context.Context, fn func(engine.Tx) error) error {
	err := c.adminSyntax.write(ctx, fn)
	if c.after--; c.after == 0 {
		c.cancel()
	}
	return err
}

// manyDead stores n dead messages in 7 groups, over 4 partitions.
func (t adminTest) manyDead(n int) {
	t.Helper()
	list := make([]stored, n)
	for i := range list {
		g := i % 7
		list[i] = stored{id: int64(i + 1), group: fmt.Sprint(g), status: Dead, attempts: 5, partition: g % 4, partitions: 4}
	}
	t.store(list...)
}

func TestCancelKeepsWhatWasDone(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.manyDead(3*changeChunk + 1)
		ctx, cancel := context.WithCancel(t.Context())
		cut := *t.Admin
		cut.syntax = &cutShort{t.syntax, 2, cancel}
		n, err := cut.RetryDeadWhere(ctx, "orders", Filter{Status: Dead})
		if n != 2*changeChunk || !errors.Is(err, context.Canceled) {
			t.Errorf("retried %d with error %v, want %d and that the context was cancelled", n, err, 2*changeChunk)
		}
		t.want(t.RetryDeadWhere(t.Context(), "orders", Filter{Status: Dead}))(changeChunk + 1)
	})
}

// Ids are taken in their order, whatever the order they are given in.
func TestIDsAreSorted(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.manyDead(changeChunk + 1)
		ctx, cancel := context.WithCancel(t.Context())
		cut := *t.Admin
		cut.syntax = &cutShort{t.syntax, 1, cancel}
		var ids []int64
		for id := int64(changeChunk + 1); id > 0; id-- {
			ids = append(ids, id)
		}
		if n, err := cut.RetryDead(ctx, "orders", ids); n != changeChunk || !errors.Is(err, context.Canceled) {
			t.Errorf("retried %d with error %v", n, err)
		}
		t.wantList(Dead, fmt.Sprintf("%d@5", changeChunk+1))
	})
}

// C47: two replays of 20,000 messages at once retry each message once, and at
// no time is a message pending while an earlier one of its group is dead.
func TestReplaysKeepOrder(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		const n = 20_000
		t.manyDead(n)
		var counts [2]int
		var replays, watch sync.WaitGroup
		for i := range counts {
			replays.Go(func() {
				var err error
				if counts[i], err = t.RetryDeadWhere(t.Context(), "orders", Filter{Status: Dead}); err != nil {
					t.Error(err)
				}
			})
		}
		over := make(chan struct{})
		watch.Go(func() {
			for looks := 0; ; looks++ {
				if overtaken := t.overtaken(); overtaken != 0 {
					t.Errorf("look %d: %d groups have a pending message after a dead one", looks, overtaken)
				}
				select {
				case <-over:
					return
				default:
				}
			}
		})
		replays.Wait()
		close(over)
		watch.Wait()
		if counts[0]+counts[1] != n {
			t.Errorf("the replays retried %d and %d messages, want %d together", counts[0], counts[1], n)
		}
		if dead := t.list(Dead); len(dead) > 0 {
			t.Errorf("%d messages are still dead", len(dead))
		}
	})
}

func (t adminTest) overtaken() (n int) {
	t.Helper()
	s := t.statement(t.outboxes["orders"])
	s.add(`SELECT count(*) FROM (SELECT group_key, max(CASE WHEN status = 'pending' THEN id END) AS pending,
	min(CASE WHEN status = 'dead' THEN id END) AS dead FROM {messages} GROUP BY group_key) AS g WHERE pending > dead`)
	err := s.query(t.Context(), t.db, func(rows *sql.Rows) error { return rows.Scan(&n) })
	if err != nil {
		t.Error(err)
	}
	return n
}

// A message that dies again while it is replayed is not retried a second time
// by the same call.
func TestReplayDoesNotCircle(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.manyDead(2 * changeChunk)
		dying := *t.Admin
		dying.window = changeChunk
		dying.syntax = &afterWrite{t.syntax, func() { t.want(t.MarkDead(t.Context(), "orders", []int64{1}))(1) }}
		t.want(dying.RetryDeadWhere(t.Context(), "orders", Filter{Status: Dead}))(2 * changeChunk)
		t.wantList(Dead, "1")
	})
}

// afterWrite calls a function after the first write.
type afterWrite struct {
	adminSyntax
	call func()
}

func (a *afterWrite) write(ctx context.Context, fn func(engine.Tx) error) error {
	err := a.adminSyntax.write(ctx, fn)
	if a.call != nil {
		a.call()
		a.call = nil
	}
	return err
}

// A change that the server ends because of a deadlock, as with a worker that
// settles the same messages in another order, is made again.
func TestChangeSurvivesDeadlock(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t)
	at := postgresAdmin(t, db, tables.Name{Schema: pg.Schema, Table: "t"})
	at.store(stored{id: 1}, stored{id: 2})
	worker, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Rollback()
	touch := func(id int) {
		t.Helper()
		if _, err := worker.ExecContext(t.Context(), "UPDATE t SET attempts = 1 WHERE id = $1", id); err != nil {
			t.Error(err)
		}
	}
	if _, err := worker.ExecContext(t.Context(), "SET LOCAL deadlock_timeout = '1h'"); err != nil {
		t.Fatal(err) // the other one finds the deadlock, and gives way
	}
	touch(2)
	var changed sync.WaitGroup
	changed.Go(func() { at.want(at.Discard(t.Context(), "orders", []int64{1, 2}))(2) })
	for waiting := 0; waiting == 0; {
		row := db.QueryRowContext(t.Context(), "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid() AND transactionid IS NOT NULL AND EXISTS (SELECT FROM pg_locks o WHERE o.pid = pg_locks.pid AND o.relation = 't'::regclass)")
		if err := row.Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	touch(1)
	if err := worker.Commit(); err != nil {
		t.Error(err)
	}
	changed.Wait()
}
