package outbox_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// A relay that adds to the outbox needs a connection beside the delivery's;
// SQLite gets by with one. C63
func TestRelayThatAdds(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, db *gorm.DB) {
		r := newRecorder()
		c := one(nil)
		c.Outboxes[0].Relay = outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
			if n := len(e.GroupKey); n < 3 {
				err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
					return outbox.Add(tx, grouped(e.Type, e.GroupKey+"g"))
				})
				if err != nil {
					return err
				}
			}
			return r.Deliver(ctx, []outbox.Envelope{e})
		})
		in := setUp(t, db, c)
		start(t, in)
		publish(t, db, message("t"))
		r.wait(t, 4)
		if _, err := in.Prune(t.Context()); err != nil {
			t.Errorf("Prune: %v", err)
		}
	}
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, testdb.Postgres(t).Gorm(t, testdb.PoolSize(2)))
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, testdb.SQLite(t).Gorm(t, testdb.PoolSize(1)))
	})
}

// C32
func TestThroughPgBouncer(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*outbox.Config, *testdb.PG){
		"with a direct connection to listen on": func(c *outbox.Config, pg *testdb.PG) {
			c.ListenDSN, c.PollInterval = pg.Direct, never
		},
		"with a function that connects": func(c *outbox.Config, pg *testdb.PG) {
			c.PollInterval = never
			c.Listen = func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, pg.Direct) }
		},
		"by itself":    func(c *outbox.Config, _ *testdb.PG) { c.PollInterval = 20 * time.Millisecond },
		"without push": func(c *outbox.Config, _ *testdb.PG) { c.PollInterval, c.Notify = 20*time.Millisecond, outbox.Off },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testdb.PgBouncer(t)
			mode := testdb.ExecMode(pgx.QueryExecModeExec)
			c, r := relayed(nil)
			change(&c, pg)
			start(t, setUp(t, pg.Gorm(t, mode), c))
			publisher := pg.Gorm(t, mode)
			install(t, publisher, one(nil))
			for i := range 5 {
				publish(t, publisher, grouped(fmt.Sprint(i), "g"))
				r.wait(t, i+1)
			}
			if got := r.types(); !slices.Equal(got, []string{"0", "1", "2", "3", "4"}) {
				t.Errorf("delivered %v", got)
			}
		})
	}
}

// sqlLog is a logger.Writer.
type sqlLog struct{ strings.Builder }

func (l *sqlLog) Printf(format string, args ...any) { _, _ = fmt.Fprintf(l, format, args...) }

// C15
func TestLogsHoldNoMessages(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const marker = "s3cret"
		var text sqlLog
		core, lines := observer.New(zap.DebugLevel)
		db := open(testdb.Config(&gorm.Config{
			Logger: logger.New(&text, logger.Config{LogLevel: logger.Info, SlowThreshold: 1}),
		}))
		c, r := relayed(nil)
		c.Logger = zap.New(core)
		in := setUp(t, db, c)
		m := outbox.Message{Type: "t", GroupKey: marker, Payload: []byte(marker), Headers: map[string]string{marker: marker}}
		start(t, in)
		publish(t, db, m, m)
		r.wait(t, 2)
		if err := in.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := db.Migrator().DropTable(outbox.DefaultTable); err != nil {
			t.Fatal(err)
		}
		err := db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, m) })
		if err == nil || strings.Contains(err.Error(), marker) {
			t.Errorf("Add without a table: %v", err)
		}
		if !strings.Contains(text.String(), "DROP TABLE") {
			t.Error("the test does not see what GORM logs")
		}
		if all := text.String() + fmt.Sprint(lines.All()); strings.Contains(all, marker) {
			t.Errorf("the logs hold a message:\n%s", all)
		}
	})
}

// C06: a panic in the closure, and a transaction that nobody finishes.
func TestUnfinishedTransactions(t *testing.T) {
	t.Parallel()
	db := testdb.Postgres(t).Gorm(t, testdb.PoolSize(4))
	c, r := relayed(nil)
	c.PollInterval = 20 * time.Millisecond
	in := setUp(t, db, c)
	start(t, in)
	func() {
		defer func() { _ = recover() }()
		_ = db.Transaction(func(tx *gorm.DB) error {
			add(t, tx, grouped("panicked", "g"))
			panic("handler")
		})
	}()
	leaked := begin(t, db)
	add(t, leaked, grouped("leaked", "g"))
	publish(t, db, grouped("other", "another"))
	r.wait(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := in.Stop(ctx); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := leaked.Rollback().Error; err != nil {
		t.Errorf("Rollback: %v", err)
	}
	drain(t, in)
	if got := r.types(); !slices.Equal(got, []string{"other"}) {
		t.Errorf("delivered %v, want other alone", got)
	}
}
