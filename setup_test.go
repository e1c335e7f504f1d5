package outbox_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// GORM's cache of statements, which dbresolver makes, never ends its goroutine.
func TestMain(m *testing.M) {
	testdb.Main(m, goleak.IgnoreAnyFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

// onEach runs a test on both databases. open gives another handle, with a pool
// of its own, on the same database each time.
func onEach(t *testing.T, test func(t *testing.T, open func(...testdb.Option) *gorm.DB)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pg := testdb.Postgres(t)
		test(t, func(opts ...testdb.Option) *gorm.DB { return pg.Gorm(t, opts...) })
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		lite := testdb.SQLite(t)
		test(t, func(opts ...testdb.Option) *gorm.DB { return lite.Gorm(t, opts...) })
	})
}

// install makes an instance on db, without its tables. It is stopped when the
// test ends.
func install(t testing.TB, db *gorm.DB, c outbox.Config) *outbox.Instance {
	t.Helper()
	in, err := outbox.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Use(in); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := in.Stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return in
}

// setUp is install with the tables.
func setUp(t testing.TB, db *gorm.DB, c outbox.Config) *outbox.Instance {
	t.Helper()
	in := install(t, db, c)
	if err := in.AutoMigrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return in
}

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// recorder is a relay that remembers what it was given.
type recorder struct {
	mu        sync.Mutex
	delivered []outbox.Envelope
	came      chan struct{} // of one: something was delivered
}

func newRecorder() *recorder { return &recorder{came: make(chan struct{}, 1)} }

func (r *recorder) Deliver(_ context.Context, batch []outbox.Envelope) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range batch {
		e.Payload = slices.Clone(e.Payload)
		r.delivered = append(r.delivered, e)
	}
	select {
	case r.came <- struct{}{}:
	default:
	}
	return nil
}

// types lists what was delivered, in order.
func (r *recorder) types() []string {
	var list []string
	for _, e := range r.all() {
		list = append(list, e.Type)
	}
	return list
}

func (r *recorder) all() []outbox.Envelope {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.delivered)
}

// wait returns when at least n messages were delivered.
func (r *recorder) wait(t testing.TB, n int) []outbox.Envelope {
	t.Helper()
	deadline := time.After(patience)
	for {
		if list := r.all(); len(list) >= n {
			return list
		}
		select {
		case <-r.came:
		case <-deadline:
			t.Fatalf("%d messages were delivered, want %d", len(r.all()), n)
		}
	}
}

// drain delivers what is due and returns how many messages that were.
func drain(t testing.TB, in *outbox.Instance) int {
	t.Helper()
	result, err := in.Drain(t.Context())
	if err != nil {
		t.Fatalf("drain: %v", err)
	}
	return result.Delivered
}

// message is a valid one.
func message(typ string) outbox.Message { return outbox.Message{Type: typ} }

// Row is a business table.
type Row struct {
	ID   int64
	Name string
}

func countRows(t testing.TB, db *gorm.DB) int64 {
	t.Helper()
	var n int64
	if err := db.Model(&Row{}).Count(&n).Error; err != nil {
		t.Fatal(err)
	}
	return n
}

func createRows(t testing.TB, db *gorm.DB) {
	t.Helper()
	if err := db.AutoMigrate(&Row{}); err != nil {
		t.Fatal(err)
	}
}

// inTx commits unless fn fails.
func inTx(t testing.TB, db *gorm.DB, fn func(tx *gorm.DB) error) {
	t.Helper()
	if err := db.Transaction(fn); err != nil {
		t.Fatalf("transaction: %v", err)
	}
}
