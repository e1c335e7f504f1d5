package dialect_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// What follows are the traps of doing this on PostgreSQL, each of which a
// plausible implementation falls into.

var onlyLane = engine.Lane{Outbox: storagetest.Orders, Partition: 0, Partitions: 1}

func anyQuery() engine.Query {
	return engine.Query{Limit: 100, MaxBytes: 1 << 20, Lease: 5 * time.Second}
}

func groupRow(group string) engine.Row {
	return engine.Row{
		Outbox: storagetest.Orders, GroupKey: group, Hash: engine.GroupHash(group), Lock: group != "",
		Type: "t", Payload: []byte("p"),
	}
}

func begin(t *testing.T, db *sql.DB) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// addIn inserts rows and gives their ids.
func addIn(t *testing.T, s engine.Storage, tx engine.Tx, rows ...engine.Row) []int64 {
	t.Helper()
	stored, err := s.Insert(t.Context(), tx, rows, true)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]int64, len(stored))
	for i, e := range stored {
		ids[i] = e.ID
	}
	return ids
}

func commit(t *testing.T, tx *sql.Tx) {
	t.Helper()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

// deliverAll fetches once, settles everything as delivered and gives the ids.
func deliverAll(t *testing.T, s engine.Storage, lane engine.Lane) []int64 {
	t.Helper()
	var ids []int64
	err := s.WithPartition(t.Context(), lane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, anyQuery())
		if err != nil {
			return err
		}
		for _, e := range page.Envelopes {
			ids = append(ids, e.ID)
		}
		c.Settle(engine.Settlement{Delivered: ids})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func queryInt(t *testing.T, db *sql.DB, query string, args ...any) int {
	t.Helper()
	var n int
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// waitFor polls the server until the query counts at least one: a signal that
// another session has come to a certain point.
func waitFor(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for queryInt(t, db, query, args...) == 0 {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the server never came to the awaited state")
		}
	}
}

// While the relay works, the owner's transaction must hold back no vacuum: the
// snapshot of the fetch is gone, in every way the connection may speak.
func TestDeliveryHoldsNoSnapshot(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			db, observer := pg.SQL(t, testdb.ExecMode(mode), testdb.Param("application_name", pg.Schema)), pg.SQL(t)
			s := newPostgres(t, db)
			tx := begin(t, db)
			addIn(t, s, tx, groupRow("a"), groupRow("b"))
			commit(t, tx)
			err := s.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
				for round := range 2 { // the second one comes in the same packet as a settlement
					page, err := c.Fetch(ctx, engine.Query{Limit: 1, MaxBytes: 1, Lease: time.Second})
					if err != nil {
						return err
					}
					stop := c.Watch(func() { t.Error("ownership lost") })
					held := queryInt(t, observer, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1
						AND state = 'idle in transaction' AND backend_xmin IS NULL AND backend_xid IS NULL`, pg.Schema)
					stop()
					if held != 1 || len(page.Envelopes) != 1 {
						t.Errorf("round %d: %d owners without snapshot and transaction id, %d messages; want 1 of each", round, held, len(page.Envelopes))
					}
					c.Settle(engine.Settlement{Delivered: []int64{page.Envelopes[0].ID}})
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// The fetch must not see what the last owner has deleted, whatever isolation
// the role asks for: its snapshot is younger than the lock. C18
func TestFetchIsYoungerThanTheLock(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			db := pg.SQL(t, testdb.Param("default_transaction_isolation", level))
			s := newPostgres(t, db)
			tx := begin(t, db)
			addIn(t, s, tx, groupRow("a"))
			commit(t, tx)
			err := s.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
				// A claim that finds the lane busy has begun a transaction.
				if err := otherOwner(ctx, s, func() error { _, err := c.Fetch(ctx, anyQuery()); return err }); err != nil {
					return err
				}
				page, err := c.Fetch(ctx, anyQuery())
				if len(page.Envelopes) != 0 {
					t.Errorf("fetched %d messages that the last owner delivered", len(page.Envelopes))
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// otherOwner delivers everything as somebody else, and runs meanwhile while it
// owns the lane.
func otherOwner(ctx context.Context, s engine.Storage, meanwhile func() error) error {
	return s.WithPartition(ctx, onlyLane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, anyQuery())
		if err != nil {
			return err
		}
		if err := meanwhile(); !errors.Is(err, engine.ErrBusy) {
			return fmt.Errorf("fetch of an owned lane: %w, want ErrBusy", err)
		}
		c.Settle(engine.Settlement{Delivered: []int64{page.Envelopes[0].ID}})
		return nil
	})
}

// The group's lock comes before the id: an add that waits for another one of
// its group draws a higher id, although it began when the other was open.
func TestIDIsDrawnUnderTheGroupLock(t *testing.T) {
	t.Parallel()
	for name, rows := range map[string][]engine.Row{
		"one message":   {groupRow("g")},
		"many messages": {groupRow("h"), groupRow("g"), groupRow("h")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			db := pg.SQL(t)
			s := newPostgres(t, db)
			first := begin(t, db)
			addIn(t, s, first, groupRow("g"))
			ids := make(chan []int64, 1)
			go func() {
				tx := begin(t, db)
				ids <- addIn(t, s, tx, rows...)
				commit(t, tx)
			}()
			waitFor(t, db, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`)
			// The waiting add has begun. Were its id drawn already, this one's
			// would be higher.
			last := addIn(t, s, first, groupRow("g"))
			commit(t, first)
			if got := <-ids; got[0] <= last[0] {
				t.Errorf("the add that waited got id %d, the one before it %d", got[0], last[0])
			}
		})
	}
}

// A lower id may be committed late. Nothing waits for it, nothing is lost, and
// within a group it cannot happen. C17
func TestLateCommitOfALowerID(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t)
	s := newPostgres(t, db)
	late := begin(t, db)
	low := addIn(t, s, late, groupRow("a"))
	aborted := begin(t, db)
	addIn(t, s, aborted, groupRow("gap"))
	_ = aborted.Rollback()
	tx := begin(t, db)
	high := addIn(t, s, tx, groupRow("b"))
	commit(t, tx)
	if got := deliverAll(t, s, onlyLane); !slices.Equal(got, high) {
		t.Errorf("delivered %v while id %d was open, want %v", got, low[0], high)
	}
	commit(t, late)
	if got := deliverAll(t, s, onlyLane); !slices.Equal(got, low) {
		t.Errorf("delivered %v after the late commit, want %v", got, low)
	}
}

// Crossed groups of two transactions end in one deadlock error, which can be
// retried; two adds that name the same groups in different order do not. C17
func TestCrossedGroups(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t, testdb.Param("deadlock_timeout", "100ms"))
	s := newPostgres(t, db)
	x, y := begin(t, db), begin(t, db)
	addIn(t, s, x, groupRow("g"))
	addIn(t, s, y, groupRow("h"))
	errs := make(chan error, 2)
	add := func(tx *sql.Tx, group string) {
		_, err := s.Insert(t.Context(), tx, []engine.Row{groupRow(group)}, false)
		errs <- errors.Join(err, tx.Rollback())
	}
	go add(x, "h")
	go add(y, "g")
	deadlocks := 0
	for range 2 {
		if err := <-errs; err != nil {
			var coded interface{ SQLState() string }
			if !errors.As(err, &coded) || coded.SQLState() != "40P01" {
				t.Errorf("crossed add: %v, want a deadlock error", err)
			}
			deadlocks++
		}
	}
	if deadlocks != 1 {
		t.Errorf("%d deadlocks, want 1", deadlocks)
	}
}

// One claim holds one advisory lock, whatever the plan: statistics absent,
// sequential scans preferred. C19
func TestOneLockForOneClaim(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t, testdb.Param("enable_indexscan", "off"), testdb.Param("enable_indexonlyscan", "off"))
	observer := pg.SQL(t)
	s := newPostgres(t, db)
	tx := begin(t, db)
	rows := make([]engine.Row, 10_000)
	for i := range rows {
		rows[i] = groupRow("")
	}
	addIn(t, s, tx, rows...)
	commit(t, tx)
	err := s.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, anyQuery())
		if err != nil {
			return err
		}
		if len(page.Envelopes) != 100 {
			t.Errorf("fetched %d messages, want 100", len(page.Envelopes))
		}
		n := queryInt(t, observer, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND classid = (($1::regclass::oid::bigint # $2::bigint)::bit(32)::int4)::bigint & 4294967295::bigint`,
			outboxes[storagetest.Orders].Messages(), int64(engine.GroupHash(storagetest.Orders)&0xffffffff))
		if n != 1 {
			t.Errorf("%d advisory locks of the lane, want 1", n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A large add takes a bounded number of locks, or it would empty the server's
// lock table for everybody.
func TestLargeAddTakesBoundedLocks(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t)
	s := newPostgres(t, db)
	tx := begin(t, db)
	rows := make([]engine.Row, 20_000)
	for i := range rows {
		rows[i] = groupRow(fmt.Sprint("group ", i))
	}
	if _, err := s.Insert(t.Context(), tx, rows, false); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n > 1024 || n < 900 {
		t.Errorf("%d locks for 20,000 groups, want about 1,024 and no more", n)
	}
}

// A publisher that read the partition count before it was changed, and commits
// long after, delivers into the old lane. The message is found, and no later
// one of its group overtakes it. C56
func TestPublisherOpenAcrossAChangeOfPartitions(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t)
	inst := pgInstance(t, db, pg.SQL(t))
	s := inst.Storage
	open := begin(t, db)
	early := addIn(t, s, open, groupRow("g"))
	inst.SetPartitions(t, storagetest.Orders, 8)
	tx := begin(t, db)
	addIn(t, s, tx, groupRow("other"))
	commit(t, tx)
	commit(t, open)
	tx = begin(t, db)
	later := addIn(t, s, tx, groupRow("g"))
	commit(t, tx)

	lane := engine.Lane{Outbox: storagetest.Orders, Partition: engine.Partition(engine.GroupHash("g"), 8), Partitions: 8}
	if got := deliverAll(t, s, lane); len(got) != 0 {
		t.Errorf("delivered %v while an earlier message lies in an old lane", got)
	}
	moved, more, err := s.Remap(t.Context(), storagetest.Orders, 100)
	if err != nil || moved != 1 || more {
		t.Errorf("remap moved %d, more %v: %v; want 1", moved, more, err)
	}
	if got, want := deliverAll(t, s, lane), slices.Concat(early, later); !slices.Equal(got, want) {
		t.Errorf("delivered %v, want %v", got, want)
	}
}

// The server ends an owner that does nothing, within a bound that the storage
// sets, and the owner is told while its relay works. C22
func TestOwnerLearnsThatItsTransactionIsGone(t *testing.T) {
	t.Parallel()
	for name, kill := range map[string]string{
		"terminated": `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND state = 'idle in transaction'`,
		"idle":       `SELECT true WHERE $1::text <> ''`, // the lease runs out by itself
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			// The role's own timeout would end it much earlier than its lease.
			db := pg.SQL(t, testdb.Param("application_name", pg.Schema), testdb.Param("idle_in_transaction_session_timeout", "300ms"))
			observer := pg.SQL(t)
			s := newPostgres(t, observer)
			tx := begin(t, observer)
			addIn(t, s, tx, groupRow("a"))
			commit(t, tx)
			s, err := dialect.NewPostgres(db, dialect.Config{Outboxes: outboxes})
			if err != nil {
				t.Fatal(err)
			}
			q := anyQuery()
			q.Lease = -4500 * time.Millisecond // with the storage's margin of 5 s: half a second
			lost := make(chan struct{})
			err = s.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
				page, err := c.Fetch(ctx, q)
				if err != nil {
					return err
				}
				stop := c.Watch(func() { close(lost) })
				defer stop()
				if _, err := observer.ExecContext(ctx, kill, pg.Schema); err != nil {
					return err
				}
				<-lost
				if err := c.Alive(ctx); !errors.Is(err, engine.ErrOwnershipLost) {
					t.Errorf("alive = %v, want ErrOwnershipLost", err)
				}
				c.Settle(engine.Settlement{Delivered: []int64{page.Envelopes[0].ID}})
				return nil
			})
			var unsettled *engine.SettleError
			if !errors.As(err, &unsettled) || len(unsettled.Settlement.Delivered) != 1 {
				t.Fatalf("claim = %v, want a SettleError with what was delivered", err)
			}
			// What was delivered can still be recorded.
			if err := s.Settle(t.Context(), storagetest.Orders, unsettled.Settlement); err != nil {
				t.Fatal(err)
			}
			if got := deliverAll(t, s, onlyLane); len(got) != 0 {
				t.Errorf("delivered %v again", got)
			}
		})
	}
}
