package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

// adminTest is a migrated database with its administration.
type adminTest struct {
	*testing.T
	*Admin
	db *sql.DB
}

// administer runs a test on both databases, in the table t, with the outbox
// "orders" in it, and its neighbour "other".
func administer(t *testing.T, test func(t adminTest)) {
	t.Helper()
	administerTable(t, "t", test)
}

func administerTable(t *testing.T, table string, test func(t adminTest)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pg := testdb.Postgres(t)
		test(postgresAdmin(t, pg.SQL(t), tables.Name{Schema: pg.Schema, Table: table}))
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		name := tables.Name{Table: table}
		db := testdb.SQLite(t).SQL(t)
		migrate(t, db, migrator.SQLite, name)
		s, err := NewSQLite(db, Config{Outboxes: twoOutboxes(name)})
		if err != nil {
			t.Fatal(err)
		}
		test(adminTest{t, s.Admin(), db})
	})
}

func postgresAdmin(t *testing.T, db *sql.DB, name tables.Name) adminTest {
	t.Helper()
	migrate(t, db, migrator.Postgres, name)
	p, err := NewPostgres(db, Config{Outboxes: twoOutboxes(name)})
	if err != nil {
		t.Fatal(err)
	}
	return adminTest{t, p.Admin(), db}
}

func twoOutboxes(name tables.Name) map[string]tables.Name {
	return map[string]tables.Name{"orders": name, "other": name}
}

func migrate(t *testing.T, db *sql.DB, d migrator.Dialect, name tables.Name) {
	t.Helper()
	m, err := migrator.New(db, migrator.Config{Dialect: d, Schema: name.Schema, Table: name.Table})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// stored is a message put into a table as it is. The zero value is pending and
// ready, in the only partition.
type stored struct {
	id         int64
	outbox     string // empty: orders
	group      string
	status     Status // empty: Pending
	attempts   int
	due        time.Duration // from now; 0: at once
	age        time.Duration
	lastError  string
	partition  int
	partitions int // 0: 1
	typ        string
	payload    string
	headers    string
}

func (t adminTest) store(list ...stored) {
	t.Helper()
	for chunk := range slices.Chunk(list, 500) {
		s := t.statement(t.outboxes["orders"])
		s.add("INSERT INTO {messages} (id, outbox, partition, partitions, group_key, type, status, attempts, payload, headers, last_error, inserted_at, scheduled_at, dead_at, delivered_at) VALUES ")
		for i, m := range chunk {
			if i > 0 {
				s.add(", ")
			}
			s.add(m.values(t.syntax))
		}
		if _, err := s.exec(t.Context(), t.db); err != nil {
			t.Fatal(err)
		}
	}
}

func (m stored) values(syntax adminSyntax) string {
	text := func(s, zero string) string {
		if s == "" {
			return zero
		}
		return tables.Literal(s)
	}
	scheduled, dead, delivered := "NULL", "NULL", "NULL"
	if m.due != 0 {
		scheduled = syntax.ago(-m.due)
	}
	switch m.status {
	case Dead:
		dead = syntax.ago(m.age)
	case Delivered:
		delivered = syntax.ago(m.age)
	}
	return fmt.Sprintf("(%d, %s, %d, %d, %s, %s, %s, %d, %s, %s, %s, %s, %s, %s, %s)",
		m.id, text(m.outbox, "'orders'"), m.partition, max(m.partitions, 1), text(m.group, "NULL"), text(m.typ, "'test'"),
		text(string(m.status), "'pending'"), m.attempts, blob(syntax, m.payload), text(m.headers, "'{}'"), text(m.lastError, "NULL"),
		syntax.ago(m.age), scheduled, dead, delivered)
}

func blob(syntax adminSyntax, text string) string {
	if _, ok := syntax.(liteAdmin); ok {
		return fmt.Sprintf("x'%x'", text)
	}
	return fmt.Sprintf(`'\x%x'::bytea`, text)
}

// list reads the messages of "orders" by status, as "id" or "id@attempts".
func (t adminTest) list(status Status) []string {
	t.Helper()
	page, err := t.Messages(t.Context(), MessageQuery{Outbox: "orders", Filter: Filter{Status: status}, Limit: MaxPageLimit})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range page.Messages {
		text := fmt.Sprint(m.ID)
		if m.Attempts > 0 {
			text += fmt.Sprintf("@%d", m.Attempts)
		}
		ids = append(ids, text)
	}
	return ids
}

func (t adminTest) wantList(status Status, want ...string) {
	t.Helper()
	if got := t.list(status); !slices.Equal(got, want) {
		t.Errorf("%s messages are %v, want %v", status, got, want)
	}
}

func (t adminTest) message(id int64) MessageInfo {
	t.Helper()
	page, err := t.Messages(t.Context(), MessageQuery{Outbox: "orders", After: id - 1, Limit: 1, Payload: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Messages) == 0 || page.Messages[0].ID != id {
		t.Fatalf("there is no message %d", id)
	}
	return page.Messages[0]
}

func (t adminTest) want(n int, err error) func(want int) {
	return func(want int) {
		t.Helper()
		if err != nil || n != want {
			t.Errorf("changed %d messages, error %v; want %d", n, err, want)
		}
	}
}

func TestChangesByID(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		ctx := t.Context()
		t.store(
			stored{id: 1, status: Dead, attempts: 3, lastError: "broken"},
			stored{id: 2, status: Dead, attempts: 1},
			stored{id: 3},
			stored{id: 4, attempts: 2, due: time.Hour, lastError: "refused"},
			stored{id: 5, status: Delivered},
			stored{id: 6, outbox: "other", status: Dead},
		)
		t.want(t.RetryDead(ctx, "orders", nil))(0)
		t.want(t.Discard(ctx, "orders", nil))(0)
		t.want(t.RetryDead(ctx, "orders", []int64{6, 5, 4, 3, 1, 1, 99}))(1)
		t.wantList(Dead, "2@1")
		t.wantList(Pending, "1", "3", "4@2")
		if m := t.message(1); m.LastError != "broken" || m.ScheduledAt.UnixMicro() != 0 || !m.DeadAt.IsZero() {
			t.Errorf("the retried message has error %q, is scheduled at %v and dead at %v", m.LastError, m.ScheduledAt, m.DeadAt)
		}

		t.want(t.MarkDead(ctx, "orders", []int64{2, 3, 4, 5, 6}))(2)
		t.wantList(Dead, "2@1", "3", "4@2")
		if m := t.message(3); m.LastError != markedDead || m.DeadAt.IsZero() {
			t.Errorf("the message marked dead has error %q and is dead at %v", m.LastError, m.DeadAt)
		}
		if m := t.message(4); m.LastError != "refused" {
			t.Errorf("the failed message marked dead has error %q, want its own", m.LastError)
		}

		t.want(t.Discard(ctx, "orders", []int64{1, 2, 5, 6}))(3)
		t.wantList("", "3", "4@2")
		t.want(t.RetryDead(ctx, "other", []int64{6}))(1)
	})
}

func TestRetryNow(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(
			stored{id: 1, attempts: 2, due: time.Hour, group: "a"},
			stored{id: 2, attempts: 2, due: time.Hour, group: "b"},
			stored{id: 3, due: time.Hour, group: "a"},
			stored{id: 4, attempts: 1, due: -time.Hour, group: "a"},
			stored{id: 5, status: Dead, attempts: 1, due: time.Hour, group: "a"},
		)
		t.want(t.RetryNow(t.Context(), "orders", Filter{GroupKey: "a"}))(1)
		m := t.message(1)
		if wait := m.ScheduledAt.Sub(m.InsertedAt); wait > time.Minute || m.Attempts != 2 {
			t.Errorf("the message is due %v after it was added, with %d attempts", wait, m.Attempts)
		}
		t.want(t.RetryNow(t.Context(), "orders", Filter{Status: Pending}))(1)
	})
}

func TestFilters(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(
			stored{id: 1, group: "a", typ: "placed", age: time.Hour},
			stored{id: 2, group: "b", typ: "placed", due: time.Hour},
			stored{id: 3, group: "a", status: Dead, attempts: 3, lastError: "50% off", age: 2 * time.Hour},
			stored{id: 4, group: "a", attempts: 1, due: time.Hour, lastError: "refused", typ: "paid"},
			stored{id: 5, status: Delivered, typ: "paid"},
			stored{id: 6, outbox: "other", group: "a"},
		)
		for _, c := range []struct {
			filter Filter
			want   []int64
		}{
			{Filter{}, []int64{1, 2, 3, 4, 5}},
			{Filter{Status: Pending}, []int64{1, 2, 4}},
			{Filter{Status: Delivered}, []int64{5}},
			{Filter{Status: Dead}, []int64{3}},
			{Filter{GroupKey: "a"}, []int64{1, 3, 4}},
			{Filter{Type: "paid"}, []int64{4, 5}},
			{Filter{AfterID: 2, BeforeID: 5}, []int64{3, 4}},
			{Filter{OlderThan: 30 * time.Minute}, []int64{1, 3}},
			{Filter{ErrorContains: "0% o"}, []int64{3}},
			{Filter{ErrorContains: "%"}, []int64{3}},
			{Filter{MinAttempts: 2}, []int64{3}},
			{Filter{GroupKey: "a", Status: Pending, MinAttempts: 1, ErrorContains: "ref", OlderThan: 0, Type: "paid"}, []int64{4}},
			{Filter{GroupKey: "'; --"}, nil},
		} {
			page, err := t.Messages(t.Context(), MessageQuery{Outbox: "orders", Filter: c.filter})
			if err != nil {
				t.Errorf("%+v: %v", c.filter, err)
			}
			if got := ids(page); !slices.Equal(got, c.want) {
				t.Errorf("%+v selects %v, want %v", c.filter, got, c.want)
			}
		}
	})
}

func ids(page MessagePage) []int64 {
	var list []int64
	for _, m := range page.Messages {
		list = append(list, m.ID)
	}
	return list
}

func TestFilterIsRefused(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(stored{id: 1, status: Dead}, stored{id: 2, attempts: 1, due: time.Hour})
		calls := map[string]func(context.Context, string, Filter) (int, error){
			"RetryDeadWhere": t.RetryDeadWhere, "RetryNow": t.RetryNow, "DiscardWhere": t.DiscardWhere,
		}
		for name, call := range calls {
			for _, f := range []Filter{
				{},
				{Status: "gone"},
				{AfterID: -1},
				{BeforeID: -1},
				{OlderThan: -1},
				{MinAttempts: -1},
				{GroupKey: "\xff"},
				{Type: "a\x00b"},
				{ErrorContains: "\xff"},
			} {
				if n, err := call(t.Context(), "orders", f); err == nil || n != 0 {
					t.Errorf("%s takes %+v and changes %d messages", name, f, n)
				}
			}
		}
		if _, err := t.RetryDeadWhere(t.Context(), "orders", Filter{Status: Pending}); err == nil {
			t.Error("RetryDeadWhere takes a filter for pending messages")
		}
		if _, err := t.RetryNow(t.Context(), "orders", Filter{Status: Dead}); err == nil {
			t.Error("RetryNow takes a filter for dead messages")
		}
		t.wantList("", "1", "2@1")
	})
}

// Pages neither repeat nor omit a message that is there all the time, while
// others come and go.
func TestPagingIsStable(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		const n = 50
		for id := int64(1); id <= n; id++ {
			t.store(stored{id: 10 * id, status: []Status{Pending, Dead, Delivered}[id%3], due: time.Duration(id%2) * time.Hour})
		}
		for _, descending := range []bool{false, true} {
			q := MessageQuery{Outbox: "orders", Limit: 7, Descending: descending}
			var seen []int64
			fresh := int64(1)
			for {
				page, err := t.Messages(t.Context(), q)
				if err != nil {
					t.Fatal(err)
				}
				for _, id := range ids(page) {
					if id%10 == 0 {
						seen = append(seen, id)
					}
				}
				if page.Next == 0 {
					break
				}
				q.After = page.Next
				offset := int64(3)
				if descending {
					offset = 4
				}
				t.store(stored{id: 10*fresh + offset}, stored{id: 10*(n-fresh) + offset})
				fresh++
				t.want(t.Discard(t.Context(), "orders", []int64{10*(fresh-1) + offset}))(1)
			}
			slices.Sort(seen)
			if len(seen) != n || len(slices.Compact(seen)) != n {
				t.Errorf("descending %v: saw %d messages, want %d once each: %v", descending, len(seen), n, seen)
			}
		}
	})
}

func TestMessageIsShownAsItIs(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		t.store(stored{
			id: 7, group: "g", typ: "placed", status: Dead, attempts: 4, lastError: "broken", partition: 2, partitions: 3,
			payload: "\x00\xff payload", headers: `{"k": "v\u2028"}`, age: time.Hour,
		})
		m := t.message(7)
		if string(m.Payload) != "\x00\xff payload" || m.PayloadBytes != 10 || m.Headers["k"] != "v\u2028" || len(m.Headers) != 1 {
			t.Errorf("payload %q of %d bytes, headers %q", m.Payload, m.PayloadBytes, m.Headers)
		}
		if m.Outbox != "orders" || m.GroupKey != "g" || m.Type != "placed" || m.Status != Dead || m.Attempts != 4 ||
			m.LastError != "broken" || m.Partition != 2 || m.Partitions != 3 || m.DeadAt.IsZero() {
			t.Errorf("got %+v", m)
		}
		page, err := t.Messages(t.Context(), MessageQuery{Outbox: "orders"})
		if err != nil || page.Messages[0].Payload != nil || page.Messages[0].PayloadBytes != 10 {
			t.Errorf("without asking: %+v, %v", page, err)
		}
		for _, q := range []MessageQuery{{Limit: -1}, {Limit: MaxPageLimit + 1}, {After: -1}} {
			q.Outbox = "orders"
			if _, err := t.Messages(t.Context(), q); err == nil {
				t.Errorf("%+v is taken", q)
			}
		}
	})
}

func TestUnknownOutboxIsRefused(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		if _, err := t.Discard(t.Context(), "nowhere", []int64{1}); err == nil || !strings.Contains(err.Error(), "nowhere") {
			t.Errorf("got %v", err)
		}
	})
}
