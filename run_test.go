package outbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// never is a poll interval that no test lives to see.
const never = 24 * time.Hour

func start(t testing.TB, in *outbox.Instance) {
	t.Helper()
	if err := in.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func publish(t testing.TB, db *gorm.DB, events ...outbox.Event) {
	t.Helper()
	inTx(t, db, func(tx *gorm.DB) error { return outbox.Add(tx, events...) })
}

func TestStartNeedsRelays(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	in := setUp(t, db, outbox.Config{
		Outboxes:      []outbox.Outbox{{Name: "a"}, {Name: "b", Relay: discard}, {Name: "c"}, {Name: "d", Relay: outbox.Elsewhere}},
		DefaultOutbox: "a",
	})
	err := in.Start(t.Context())
	if !errors.Is(err, outbox.ErrNoRelay) || !strings.Contains(err.Error(), `for "a", "c": set Config.Relays`) {
		t.Errorf("Start: %v", err)
	}
}

func TestStartNeedsThePlugin(t *testing.T) {
	t.Parallel()
	c, _ := relayed(nil)
	in, err := outbox.New(c)
	if err != nil {
		t.Fatal(err)
	}
	for what, call := range map[string]func(context.Context) error{"Start": in.Start, "Run": in.Run, "Check": in.Check, "AutoMigrate": in.AutoMigrate} {
		if err := call(t.Context()); !errors.Is(err, outbox.ErrNotInstalled) {
			t.Errorf("%s: %v, want ErrNotInstalled", what, err)
		}
	}
	if err := errors.Join(in.Stop(t.Context()), in.Flush(t.Context())); err != nil {
		t.Errorf("Stop and Flush: %v", err)
	}
}

func TestStartNeedsTheTables(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		c, _ := relayed(nil)
		in := install(t, open(), c)
		for what, err := range map[string]error{"Start": in.Start(t.Context()), "Check": in.Check(t.Context())} {
			if !errors.Is(err, outbox.ErrNotMigrated) || !strings.Contains(err.Error(), "AutoMigrate") {
				t.Errorf("%s: %v, want ErrNotMigrated that names AutoMigrate", what, err)
			}
		}
		if _, err := in.Drain(t.Context()); !errors.Is(err, outbox.ErrNotMigrated) {
			t.Errorf("Drain: %v, want ErrNotMigrated", err)
		}
		if err := in.AutoMigrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := in.Check(t.Context()); err != nil {
			t.Errorf("Check: %v", err)
		}
	})
}

func TestStartNeedsTheDatabase(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, _ := relayed(nil)
		in := setUp(t, db, c)
		pool, err := db.DB()
		if err != nil {
			t.Fatal(err)
		}
		if err := pool.Close(); err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{"Start": in.Start(t.Context()), "Check": in.Check(t.Context())} {
			if err == nil || errors.Is(err, outbox.ErrNotMigrated) {
				t.Errorf("%s: %v, want that the database cannot be reached", what, err)
			}
		}
	})
}

func TestStartNeedsALargePool(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	tests := map[string]struct {
		pool, deliveries int
		want             string
	}{
		"one connection":    {1, 0, "the pool's MaxOpenConns is 1; it must be at least 2"},
		"all for delivery":  {4, 4, "Config.MaxDeliveries is 4; it must be less than the pool's MaxOpenConns, 4"},
		"some for delivery": {4, 3, ""},
		"default":           {2, 0, ""},
		"unlimited":         {0, 0, ""},
	}
	for name, tt := range tests {
		c, _ := relayed(nil)
		c.MaxDeliveries = tt.deliveries
		in := setUp(t, pg.Gorm(t, testdb.PoolSize(tt.pool)), c)
		err := in.Start(t.Context())
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: Start: %v, want %q", name, err, tt.want)
		}
		if err := in.Stop(t.Context()); err != nil {
			t.Errorf("%s: Stop: %v", name, err)
		}
	}
}

func TestCommitWakesTheWorker(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Partitions = 3 })
		c.PollInterval = never
		in := setUp(t, db, c)
		start(t, in)
		for i := range 5 {
			publish(t, db, grouped("grouped", strings.Repeat("g", i+1)), message("ungrouped"))
			r.wait(t, 2*(i+1))
		}
		_ = db.Transaction(func(tx *gorm.DB) error {
			add(t, tx, message("rolled back"))
			return errors.New("roll back")
		})
		publish(t, db, message("last"))
		if got := r.wait(t, 11); len(got) != 11 || slices.Contains(r.types(), "rolled back") {
			t.Errorf("delivered %v", r.types())
		}
	})
}

// A node that only publishes reaches one that relays, each with a pool of its
// own.
func TestOtherNodesLearnOfCommits(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]outbox.NotifyMode{"after commit": outbox.AfterCommit, "in transaction": outbox.InTransaction} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testdb.Postgres(t)
			c, r := relayed(nil)
			c.PollInterval, c.Notify = never, mode
			in := setUp(t, pg.Gorm(t), c)
			start(t, in)

			publisher := pg.Gorm(t)
			p := one(nil)
			p.Notify = mode
			job := install(t, publisher, p)
			publish(t, publisher, message("first"))
			// The job ends here: its notification must be out.
			if err := job.Flush(t.Context()); err != nil {
				t.Errorf("Flush: %v", err)
			}
			r.wait(t, 1)
			publish(t, publisher, message("second"))
			r.wait(t, 2)
		})
	}
}

// Without push, polling finds the messages of other processes.
func TestPollingFindsMessages(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		c, r := relayed(nil)
		c.PollInterval, c.Notify = 10*time.Millisecond, outbox.Off
		start(t, setUp(t, open(), c))
		publisher := open()
		install(t, publisher, one(nil))
		publish(t, publisher, message("t"))
		r.wait(t, 1)
	})
}

// C52
func TestLifecycle(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		c.PollInterval = never
		in := setUp(t, db, c)
		if err := in.Stop(t.Context()); err != nil {
			t.Errorf("Stop before Start: %v", err)
		}
		for i := range 3 {
			start(t, in)
			if err := in.Start(t.Context()); !errors.Is(err, outbox.ErrAlreadyRunning) {
				t.Errorf("second Start: %v, want ErrAlreadyRunning", err)
			}
			publish(t, db, message("running"))
			r.wait(t, 2*i+1)
			stopTogether(t, in)
			publish(t, db, message("stopped"))
			if n := drain(t, in); n != 1 {
				t.Errorf("%d messages drained after Stop, want 1", n)
			}
			if err := in.Stop(t.Context()); err != nil {
				t.Errorf("Stop after Stop: %v", err)
			}
		}
	})
}

// stopTogether calls Stop several times at once.
func stopTogether(t testing.TB, in *outbox.Instance) {
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := in.Stop(context.Background()); err != nil {
				t.Errorf("Stop: %v", err)
			}
		})
	}
	wg.Wait()
}

func TestConcurrentStarts(t *testing.T) {
	t.Parallel()
	c, _ := relayed(nil)
	in := setUp(t, testdb.SQLite(t).Gorm(t), c)
	results := make(chan error)
	for range 4 {
		go func() { results <- in.Start(t.Context()) }()
	}
	started := 0
	for range 4 {
		switch err := <-results; {
		case err == nil:
			started++
		case !errors.Is(err, outbox.ErrAlreadyRunning):
			t.Errorf("Start: %v", err)
		}
	}
	if started != 1 {
		t.Errorf("%d calls of Start succeeded, want 1", started)
	}
}

// Run returns when somebody else stops the instance.
func TestStopEndsRun(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c, r := relayed(nil)
	in := setUp(t, db, c)
	publish(t, db, message("t"))
	ended := make(chan error)
	go func() { ended <- in.Run(t.Context()) }()
	r.wait(t, 1) // it runs
	if err := in.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// C52: whatever the order, the end is quiet.
func TestStartAndStopAtOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		in := setUp(t, db, c)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 10 {
					if err := in.Start(t.Context()); err != nil && !errors.Is(err, outbox.ErrAlreadyRunning) && !errors.Is(err, outbox.ErrStopped) {
						t.Errorf("Start: %v", err)
					}
					if err := in.Stop(t.Context()); err != nil {
						t.Errorf("Stop: %v", err)
					}
				}
			})
		}
		wg.Wait()
		start(t, in)
		publish(t, db, message("t"))
		r.wait(t, 1)
	})
}

func TestStartOnEndedContext(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		c, _ := relayed(nil)
		in := setUp(t, open(), c)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for what, call := range map[string]func(context.Context) error{"Start": in.Start, "Run": in.Run} {
			if err := call(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v, want the context's error", what, err)
			}
		}
		start(t, in) // it does not run, then
	})
}

// The end of Start's context lets the running delivery settle.
func TestSoftStop(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		begun, goOn, ended := make(chan context.Context), make(chan struct{}), make(chan error)
		in := setUp(t, db, one(func(o *outbox.Outbox) {
			o.Relay = outbox.Each(func(ctx context.Context, _ outbox.Envelope) error {
				begun <- ctx
				<-goOn
				return ctx.Err()
			})
		}))
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), tenant{}, "acme"))
		go func() { ended <- in.Run(ctx) }()
		publish(t, db, message("t"))
		relayCtx := <-begun
		cancel()
		if relayCtx.Value(tenant{}) != "acme" {
			t.Error("the relay's context lacks the values of Run's")
		}
		close(goOn)
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if n := drain(t, in); n != 0 {
			t.Errorf("%d messages are left, want that the running batch was settled", n)
		}
	})
}

func TestElsewhere(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	r := newRecorder()
	c := outbox.Config{
		Outboxes: named("here", "there"), DefaultOutbox: "here",
		Relays: map[string]outbox.Relay{"here": r, "there": outbox.Elsewhere},
	}
	in := setUp(t, db, c)
	start(t, in)
	publish(t, db, outbox.Message{Outbox: "there", Type: "there"}, outbox.Message{Type: "here"})
	r.wait(t, 1)
	if _, err := in.Drain(t.Context(), "there"); !errors.Is(err, outbox.ErrNoRelay) {
		t.Errorf("Drain of an outbox that is relayed elsewhere: %v, want ErrNoRelay", err)
	}
	if err := in.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if got := r.types(); !slices.Equal(got, []string{"here"}) {
		t.Errorf("delivered %v", got)
	}
}

func TestDrainRefuses(t *testing.T) {
	t.Parallel()
	in := setUp(t, testdb.SQLite(t).Gorm(t), one(nil))
	if _, err := in.Drain(t.Context(), "odrers"); !errors.Is(err, outbox.ErrUnknownOutbox) {
		t.Errorf("Drain: %v, want ErrUnknownOutbox", err)
	}
	if _, err := in.Drain(t.Context(), "orders"); !errors.Is(err, outbox.ErrNoRelay) {
		t.Errorf("Drain: %v, want ErrNoRelay", err)
	}
	if _, err := in.Drain(t.Context()); !errors.Is(err, outbox.ErrNoRelay) {
		t.Errorf("Drain of all: %v, want ErrNoRelay", err)
	}
}

func TestDrainTellsWhatItDid(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		in := setUp(t, db, one(func(o *outbox.Outbox) {
			o.Relay = outbox.Each(func(_ context.Context, e outbox.Envelope) error {
				if e.Type == "bad" {
					return errors.New("refused")
				}
				return nil
			})
		}))
		publish(t, db, grouped("bad", "a"), grouped("good", "a"), grouped("good", "b"), outbox.Message{Type: "good", Delay: time.Hour})
		result, err := in.Drain(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if want := (outbox.DrainResult{Delivered: 1, Failed: 1, Waiting: 3}); result != want {
			t.Errorf("Drain = %+v, want %+v", result, want)
		}
	})
}

// inForce reads the partition count that the database records.
func inForce(t testing.TB, db *gorm.DB) (n int) {
	t.Helper()
	if err := db.Raw("SELECT partitions FROM outboxer_messages_meta WHERE outbox = 'orders'").Scan(&n).Error; err != nil {
		t.Fatal(err)
	}
	return n
}

func TestPartitionsInForce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		core, logs := observer.New(zap.WarnLevel)
		node := func(partitions int, relay outbox.Relay) (*outbox.Instance, *gorm.DB) {
			db := open()
			c := one(func(o *outbox.Outbox) { o.Partitions, o.Relay = partitions, relay })
			c.Logger = zap.New(core)
			return setUp(t, db, c), db
		}
		expect := func(when string, db *gorm.DB, want int) {
			t.Helper()
			if n := inForce(t, db); n != want {
				t.Errorf("%s: %d partitions, want %d", when, n, want)
			}
		}
		restart := func(in *outbox.Instance) {
			t.Helper()
			start(t, in)
			if err := in.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		old, db := node(4, discard)
		expect("after AutoMigrate", db, 4)
		node(8, nil)
		expect("after the AutoMigrate of a node that only publishes", db, 4)
		recent, _ := node(8, discard)
		expect("before Start", db, 4)
		restart(recent)
		expect("after the Start of a new node", db, 8)
		if logs.Len() != 0 {
			t.Errorf("warnings: %v", logs.All())
		}
		restart(old)
		expect("after the restart of an old node", db, 8)
		if warnings := logs.FilterMessageSnippet("Repartition"); warnings.Len() != 1 {
			t.Errorf("warnings that name Repartition: %v", logs.All())
		}
		asRecorded, _ := node(0, discard)
		restart(asRecorded)
		expect("after the Start of a node that does not care", db, 8)
	})
}

// Total is of one partition, also where there were more.
func TestTotalTakesOnePartition(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		setUp(t, db, one(func(o *outbox.Outbox) { o.Partitions = 4 }))
		var want []string
		for _, typ := range []string{"a", "b", "c", "d", "e"} {
			publish(t, db, grouped(typ, typ))
			want = append(want, typ)
		}
		total := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Ordering = outbox.Total })
		in := setUp(t, total, c)
		start(t, in)
		if n := inForce(t, total); n != 1 {
			t.Errorf("%d partitions, want 1", n)
		}
		publish(t, total, message("f"))
		r.wait(t, 6)
		if got := r.types(); !slices.Equal(got, append(want, "f")) {
			t.Errorf("delivered %v", got)
		}
	})
}
