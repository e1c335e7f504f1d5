package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func (t adminTest) stats(q OutboxQuery) (OutboxStats, Report) {
	t.Helper()
	if q.Name == "" {
		q.Name = "orders"
	}
	report, err := t.Stats(t.Context(), []OutboxQuery{q})
	if err != nil {
		t.Fatal(err)
	}
	return report.Outboxes[0], report
}

// aged reports whether an instant is about so long before the report.
func aged(r Report, at time.Time, age time.Duration) bool {
	d := r.At.Sub(at) - age
	return d >= 0 && d < time.Minute
}

// C13: whatever the table is called.
func TestStats(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"outboxer_messages", strings.Repeat("ä", 31) + "x", "Out %d Box", `it's "{quoted}"`, "{meta} {lane}{now}"} {
		administerTable(t, table, func(t adminTest) {
			t.ensure(4)
			t.store(
				stored{id: 1, partition: 0, partitions: 4, group: "a", attempts: 2, due: time.Hour, lastError: "refused", age: 3 * time.Hour},
				stored{id: 2, partition: 0, partitions: 4, group: "a", age: 2 * time.Hour},
				stored{id: 3, partition: 0, partitions: 4, group: "b", age: time.Hour},
				stored{id: 4, partition: 2, partitions: 4, due: -5 * time.Hour, age: 9 * time.Hour},
				stored{id: 5, partition: 2, partitions: 4, due: time.Hour},
				stored{id: 6, partition: 2, partitions: 4, group: "c", status: Dead, lastError: "broken", attempts: 9},
				stored{id: 7, partition: 2, partitions: 4, status: Delivered},
				stored{id: 8, partition: 5, partitions: 8},
				stored{id: 9, outbox: "other"},
				stored{id: 10, outbox: "forgotten", age: 4 * time.Hour},
				stored{id: 11, outbox: "buried", status: Dead},
			)
			o, report := t.stats(OutboxQuery{})
			t.wantOutbox(o)
			if !aged(report, o.OldestDue, 5*time.Hour) || !aged(report, o.Lanes[0].OldestDue, 2*time.Hour) {
				t.Errorf("the oldest is due since %v, in lane 0 since %v", o.OldestDue, o.Lanes[0].OldestDue)
			}
			unattended := []time.Duration{time.Hour, 0, 5 * time.Hour, 0, 0}
			for i, lane := range o.Lanes {
				if d := lane.Unattended - unattended[i]; d < 0 || d > time.Minute {
					t.Errorf("lane %d is unattended for %v, want %v", i, lane.Unattended, unattended[i])
				}
			}
			if o.Unattended != o.Lanes[2].Unattended {
				t.Errorf("the outbox is unattended for %v", o.Unattended)
			}
			t.wantFound(report)
		})
	}
}

func (t adminTest) wantOutbox(o OutboxStats) {
	t.Helper()
	if o.Outbox != "orders" || o.Table != t.outboxes["orders"].Table || o.Partitions != 4 || !o.PausedAt.IsZero() {
		t.Errorf("got %+v", o)
	}
	var lanes []string
	for _, l := range o.Lanes {
		lanes = append(lanes, fmt.Sprintf("%d/%d: %d %d %d %d", l.Partition, l.Partitions, l.Due, l.Waiting, l.Dead, l.BlockedGroups))
	}
	want := []string{"0/4: 2 1 0 1", "1/4: 0 0 0 0", "2/4: 1 1 1 0", "3/4: 0 0 0 0", "5/8: 1 0 0 0"}
	if !slices.Equal(lanes, want) {
		t.Errorf("lanes are %q, want %q", lanes, want)
	}
	if o.Due != 4 || o.Waiting != 2 || o.Dead != 1 || o.BlockedGroups != 1 || o.Pending() != 6 {
		t.Errorf("counts are %+v", o.Counts)
	}
	if len(o.Blocked) != 1 || o.Blocked[0].GroupKey != "a" || o.Blocked[0].ID != 1 || o.Blocked[0].Attempts != 2 ||
		o.Blocked[0].LastError != "refused" || o.Blocked[0].NextRetry.IsZero() {
		t.Errorf("blocked are %+v", o.Blocked)
	}
}

func (t adminTest) wantFound(report Report) {
	t.Helper()
	var found []string
	for _, f := range report.Found {
		found = append(found, fmt.Sprintf("%s %s %d %d", f.Outbox, f.Table, f.Due, f.Dead))
	}
	table := t.outboxes["orders"].Table
	if want := []string{"buried " + table + " 0 1", "forgotten " + table + " 1 0"}; !slices.Equal(found, want) {
		t.Errorf("found %q, want %q", found, want)
	}
}

// What blocks a group depends on the outbox's ordering, and on whether its
// dead messages hold (C42: groups that are parked can be counted).
func TestStatsOfBlockedGroups(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(
			stored{id: 1, group: "a", attempts: 1, due: time.Hour, age: time.Hour},
			stored{id: 2, group: "b", status: Dead, age: time.Hour},
			stored{id: 3, group: "b", status: Dead, age: time.Hour},
			stored{id: 4, attempts: 1, due: time.Hour, age: time.Hour},
			stored{id: 5, group: "b", age: time.Hour},
			stored{id: 6, group: "a", age: time.Hour},
		)
		for _, c := range []struct {
			query      OutboxQuery
			groups     int
			listed     []int64
			unattended bool
		}{
			{OutboxQuery{Ordering: engine.ByGroup}, 1, []int64{1}, true},
			{OutboxQuery{Ordering: engine.ByGroup, HoldDead: true}, 2, []int64{1, 2, 3}, false},
			{OutboxQuery{Ordering: engine.Total}, 1, []int64{1, 4}, false},
			{OutboxQuery{Ordering: engine.None}, 0, nil, true},
		} {
			o, _ := t.stats(c.query)
			var listed []int64
			for _, b := range o.Blocked {
				listed = append(listed, b.ID)
				if (b.GroupKey == "b") != b.NextRetry.IsZero() {
					t.Errorf("%+v: message %d of group %q is retried at %v", c.query, b.ID, b.GroupKey, b.NextRetry)
				}
			}
			if o.BlockedGroups != c.groups || !slices.Equal(listed, c.listed) || (o.Unattended > 0) != c.unattended {
				t.Errorf("%+v: %d groups, listed %v, unattended %v; want %d, %v, %v", c.query, o.BlockedGroups, listed, o.Unattended, c.groups, c.listed, c.unattended)
			}
		}
	})
}

// A failed message whose retry is due waits for nobody but a worker.
func TestDueRetryIsUnattended(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(stored{id: 1, group: "a", attempts: 1, due: -time.Hour, age: 3 * time.Hour})
		for _, ordering := range []engine.Ordering{engine.ByGroup, engine.Total, engine.None} {
			if o, _ := t.stats(OutboxQuery{Ordering: ordering}); o.Unattended < time.Hour || o.Unattended > 2*time.Hour {
				t.Errorf("%v: unattended for %v, want an hour", ordering, o.Unattended)
			}
		}
	})
}

func TestPausedOutboxIsNotUnattended(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(stored{id: 1, age: time.Hour})
		if err := t.Pause(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		if o, r := t.stats(OutboxQuery{}); o.Unattended != 0 || !aged(r, o.PausedAt, 0) || !aged(r, o.OldestDue, time.Hour) {
			t.Errorf("got %+v", o)
		}
	})
}

func TestStatsAreBounded(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		const n = MaxCounted + 50
		list := make([]stored, n)
		for i := range list {
			list[i] = stored{id: int64(i + 1), group: fmt.Sprint(i), attempts: 1, due: time.Hour}
		}
		t.store(list...)
		o, _ := t.stats(OutboxQuery{})
		if o.Waiting != MaxCounted || o.BlockedGroups != MaxBlockedCounted || len(o.Blocked) != MaxBlockedListed {
			t.Errorf("%d waiting, %d blocked, %d listed", o.Waiting, o.BlockedGroups, len(o.Blocked))
		}
	})
}

// The owner of a lane is the session that holds its lock, by whatever way the
// statements travel.
func TestStatsShowOwner(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			db := pg.SQL(t, testdb.ExecMode(mode), testdb.Param("application_name", "worker"))
			at := postgresAdmin(t, db, tables.Name{Schema: pg.Schema, Table: "t"})
			at.ensure(4)
			at.store(stored{id: 1, partition: 2, partitions: 4, age: time.Hour, headers: `{"k": "v"}`, payload: "\x00\xff"})
			at.want(at.MarkDead(t.Context(), "orders", []int64{1}))(1)
			at.want(at.RetryDeadWhere(t.Context(), "orders", Filter{OlderThan: time.Minute, Status: Dead, ErrorContains: "operator"}))(1)
			if m := at.message(1); string(m.Payload) != "\x00\xff" || m.Headers["k"] != "v" {
				t.Errorf("got %+v", m)
			}
			storage := at.syntax.(pgAdmin).storage
			err := storage.WithPartition(t.Context(), engine.Lane{Outbox: "orders", Partition: 2, Partitions: 4}, func(ctx context.Context, c engine.Claim) error {
				if _, err := c.Fetch(ctx, engine.Query{Limit: 1, MaxBytes: 1}); err != nil {
					return err
				}
				o, _ := at.stats(OutboxQuery{})
				for i, lane := range o.Lanes {
					if (lane.Owner != nil) != (i == 2) {
						t.Errorf("lane %d is owned by %+v", i, lane.Owner)
					}
				}
				if owner := o.Lanes[2].Owner; owner != nil && (owner.PID == 0 || owner.Application != "worker") {
					t.Errorf("the owner is %+v", owner)
				}
				if o.Unattended != 0 {
					t.Errorf("the lane is unattended for %v", o.Unattended)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if o, _ := at.stats(OutboxQuery{}); o.Lanes[2].Owner != nil || o.Unattended < time.Hour {
				t.Errorf("afterwards the owner is %+v, and the lane unattended for %v", o.Lanes[2].Owner, o.Unattended)
			}
		})
	}
}

// plans is an adminSyntax that explains each statement before it is run.
type plans struct {
	adminSyntax
	explain string
	seen    *[]string
}

func (p plans) read(ctx context.Context, walk bool, fn func(engine.Tx) error) error {
	return p.adminSyntax.read(ctx, walk, func(tx engine.Tx) error { return fn(explainer{tx, p}) })
}

func (p plans) write(ctx context.Context, fn func(engine.Tx) error) error {
	return p.adminSyntax.write(ctx, func(tx engine.Tx) error { return fn(explainer{tx, p}) })
}

type explainer struct {
	engine.Tx
	plans
}

func (e explainer) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := e.note(ctx, query, args); err != nil {
		return nil, err
	}
	return e.Tx.QueryContext(ctx, query, args...)
}

func (e explainer) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := e.note(ctx, query, args); err != nil {
		return nil, err
	}
	return e.Tx.ExecContext(ctx, query, args...)
}

func (e explainer) note(ctx context.Context, query string, args []any) error {
	rows, err := e.Tx.QueryContext(ctx, e.explain+query, args...)
	if err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return err
	}
	text := query + "\n"
	for rows.Next() {
		cells := make([]any, len(columns))
		for i := range cells {
			cells[i] = new(any)
		}
		if err := rows.Scan(cells...); err != nil {
			return err
		}
		text += fmt.Sprintln(*cells[len(cells)-1].(*any))
	}
	*e.seen = append(*e.seen, text)
	return rows.Err()
}

// No statement reads the whole of a large table, whether the database has
// statistics of it, none, or those of an empty one.
func TestPlansUseIndexes(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.analyze()
		list := make([]stored, 60_000)
		for i := range list {
			list[i] = largeTable(int64(i))
		}
		t.store(list...)
		for _, analyzed := range []bool{false, true} {
			if analyzed {
				t.analyze()
			}
			for _, plan := range t.plansOfEverything() {
				if readsTable(plan, t.outboxes["orders"].Table) {
					t.Errorf("analyzed %v: a statement reads the whole table:\n%s", analyzed, plan)
				}
				if changesWithoutID(plan) {
					t.Errorf("analyzed %v: a change does not go by the ids:\n%s", analyzed, plan)
				}
				if strings.Contains(plan, "CORRELATED LIST SUBQUERY") {
					t.Errorf("analyzed %v: a list is made anew for each row:\n%s", analyzed, plan)
				}
				if lanesByFilter.MatchString(plan) {
					t.Errorf("analyzed %v: a statement reads the outbox for each lane:\n%s", analyzed, plan)
				}
			}
		}
	})
}

// largeTable is the message of an id in a table in which 6 of 100 concern the
// outbox.
func largeTable(id int64) stored {
	switch id % 100 {
	case 1:
		return stored{id: id, attempts: 1, due: time.Hour}
	case 2, 3:
		return stored{id: id, status: Dead, attempts: 3}
	case 4, 5, 6:
		return stored{id: id}
	}
	return stored{id: id, outbox: "other", group: fmt.Sprint(id % 1000), status: Delivered}
}

func (t adminTest) analyze() {
	t.Helper()
	if _, err := t.db.ExecContext(t.Context(), "ANALYZE"); err != nil {
		t.Fatal(err)
	}
}

// plansOfEverything runs each kind of statement once.
func (t adminTest) plansOfEverything() []string {
	t.Helper()
	ctx := t.Context()
	explain := "EXPLAIN "
	if _, ok := t.syntax.(liteAdmin); ok {
		explain = "EXPLAIN QUERY PLAN "
	}
	var seen []string
	plain := t
	explained := *t.Admin
	explained.syntax = plans{t.syntax, explain, &seen}
	t.Admin = &explained
	t.stats(OutboxQuery{Ordering: engine.ByGroup, HoldDead: true})
	t.stats(OutboxQuery{Ordering: engine.Total, HoldDead: true})
	for _, f := range []Filter{{}, {Status: Pending}, {Status: Dead}, {Status: Delivered}, {GroupKey: "nobody"}, {AfterID: 50_000, BeforeID: 50_100}} {
		if _, err := t.Messages(ctx, MessageQuery{Outbox: "orders", Filter: f}); err != nil {
			t.Fatal(err)
		}
	}
	t.want(t.RetryDeadWhere(ctx, "orders", Filter{Status: Dead, BeforeID: 1000}))(20)
	t.want(t.RetryNow(ctx, "orders", Filter{MinAttempts: 1, BeforeID: 1000}))(10)
	t.want(t.MarkDead(ctx, "orders", []int64{3, 4}))(2)
	t.want(t.DiscardWhere(ctx, "orders", Filter{BeforeID: 1000}))(60)
	for id := range int64(1000) { // as it was, for the next time
		if m := largeTable(id); m.outbox == "" {
			plain.store(m)
		}
	}
	if len(seen) < 20 {
		t.Errorf("only %d statements were explained", len(seen))
	}
	return seen
}

// changesWithoutID recognises a change that does not find its messages by the
// primary key.
func changesWithoutID(plan string) bool {
	return !strings.HasPrefix(plan, "SELECT") && !strings.HasPrefix(plan, "WITH") && !strings.HasPrefix(plan, "\nSELECT") &&
		!strings.Contains(plan, "_pkey") && !strings.Contains(plan, "INTEGER PRIMARY KEY")
}

// lanesByFilter recognises a plan that finds the messages of a lane by looking at
// others.
var lanesByFilter = regexp.MustCompile(`Filter: .*\bpartition >=`)

// readsTable recognises the plans of both databases for a scan of the table.
func readsTable(plan, table string) bool {
	return strings.Contains(plan, "Seq Scan on "+table+" ") || slices.ContainsFunc(strings.Split(plan, "\n"), func(line string) bool {
		return line == "SCAN "+table || line == "SCAN TABLE "+table
	})
}
